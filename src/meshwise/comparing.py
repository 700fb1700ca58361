"""Compare layouts by running them: step time, memory and time by part, measured beside predicted."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cost.estimate import timeline_of
from .errors import LayoutError
from .events import Tell, silent
from .hardware.limits import MemoryLimit
from .job import Job
from .layout import Layout
from .planner.advice import parameter_shares
from .planner.search import Found, Task, consider, name_stages, search
from .planning import HERE, Survey, nothing_fits, size_for, survey
from .plans import Candidate, Rejection
from .quantities import format_bytes, format_count, format_seconds
from .report.comparison import Comparison, LayoutResult, MemoryBar, ScalingPoint, UnitShare
from .report.measured import bars_of, measured_parts, predicted_bars
from .trials import Trial, Turn, run_trials

MOST_LAYOUTS = 7


@dataclass(frozen=True, kw_only=True)
class _Entry:
    candidate: Candidate
    trial: Trial


def compare(
    job: Job,
    devices: int | None = None,
    *,
    layouts: Sequence[str | Layout] = (),
    memory: str | int | None = None,
    seconds: float = 1.0,
    turns: int = 3,
    threads: int = 1,
    tell: Tell = silent,
) -> Comparison:
    """Run the sensible layouts on ``devices`` of this machine (or ``layouts``) for a few steps each, in turns.

    Each turn of a layout takes about ``seconds``, in fresh ranks. Layouts that ``memory`` (default: what is free here)
    rules out are not run, but named with the numbers. Call it from one process, not under torchrun; the job's model is
    not changed. Raises LayoutError where nothing can be run.
    """
    surveyed = survey(job, devices=devices, memory=memory, threads=threads, tell=tell)
    task = surveyed.task
    found = search(task, replace(surveyed.space, recompute=False))
    candidates, rejected = _chosen(task, found, [Layout.parse(x) for x in layouts])
    if not candidates:
        raise LayoutError(nothing_fits(surveyed, Found(candidates=(), rejected=tuple(rejected))))
    entries = [_Entry(candidate=c, trial=Trial(layout=c.layout, cuts=c.cuts or None)) for c in candidates]
    sized = job.with_fields(microbatch_size=size_for(job, candidates[0]))
    run_trials(sized, [e.trial for e in entries], turn=Turn(seconds=seconds), turns=turns, threads=threads, tell=tell)
    results = tuple(_result(surveyed, e) for e in entries)
    return _comparison(surveyed, entries, results, rejected)


def _chosen(task: Task, found: Found, asked: Sequence[Layout]) -> tuple[list[Candidate], list[Rejection]]:
    """Give the layouts to run: those asked for, or one device and the best of each kind and schedule."""
    rejected = list(found.rejected)
    wanted = list(asked)
    if not wanted:
        kinds: dict[Any, Candidate] = {}
        for c in found.candidates:
            kinds.setdefault((c.layout.dp, c.layout.pp, c.layout.schedule if c.layout.pp > 1 else ""), c)
        wanted = [Layout(), *(c.layout for c in kinds.values())][:MOST_LAYOUTS]
    candidates = []
    profile, workload = task.inputs(found.candidates[0].microbatch_size if found.candidates else None)
    for layout in dict.fromkeys(wanted):
        layout.check_runnable()
        tried = consider(task, profile, workload, layout)
        if isinstance(tried, Candidate):
            candidates.append(tried)
        elif all(r.layout != tried.layout for r in rejected):
            rejected.append(tried)
    return candidates, rejected


def _result(surveyed: Survey, entry: _Entry) -> LayoutResult:
    task, candidate, trial = surveyed.task, entry.candidate, entry.trial
    profile, workload = task.inputs(candidate.microbatch_size)
    layout, predicted = candidate.layout, candidate.estimate
    timeline = timeline_of(profile, task.cluster, workload, layout, candidate.cuts, task.price(profile, layout))
    peaks: list[float | None] = list(trial.peaks) or [None] * layout.num_devices
    memory = [predicted.memory[r % layout.pp] for r in range(layout.num_devices)]
    return LayoutResult(
        layout=str(layout),
        num_devices=layout.num_devices,
        samples_per_step=surveyed.job.batch_size,
        predicted_seconds=predicted.seconds,
        seconds=tuple(trial.seconds),
        time_parts=measured_parts(trial.spans, layout, trial.median) if trial.spans else {},
        predicted_time_parts=predicted.time_parts,
        memory=tuple(
            MemoryBar(rank=r, parts=m.parts, reserved=m.reserved, measured=peaks[r]) for r, m in enumerate(memory)
        ),
        stages=candidate.stages or name_stages(profile, candidate.cuts),
        timeline=bars_of(trial.spans),
        predicted_timeline=predicted_bars(timeline, predicted, layout),
        error=trial.error,
    )


def _comparison(
    surveyed: Survey, entries: Sequence[_Entry], results: tuple[LayoutResult, ...], rejected: Sequence[Rejection]
) -> Comparison:
    ran = [r for r in results if r.median is not None]
    best = min(ran, key=lambda r: r.median or 0.0, default=None)
    task = surveyed.task
    return Comparison(
        job=surveyed.job.name,
        machine=f"{task.cluster.name}, {platform.node()}",
        facts=tuple(_facts(surveyed, entries[0].candidate)),
        results=results,
        rejected=tuple(rejected),
        best="" if best is None else best.layout,
        advice=_sentence(results, best),
        limit_bytes=task.limit_bytes,
        units=unit_shares(task),
        scaling=tuple(_scaling(task, ran)),
        notes=surveyed.notes,
    )


def _facts(surveyed: Survey, candidate: Candidate) -> list[tuple[str, str]]:
    job, profile = surveyed.job, surveyed.profile
    limit: MemoryLimit | None = surveyed.limit
    count = sum(p.num_elements for p in profile.parameters.values())
    workload = surveyed.task.workloads[0]
    import torch

    return [
        ("model", f"{format_count(count)} parameters, {len(profile.units)} units that stages can be made of"),
        (
            "batch",
            f"{job.batch_size} samples a step, {workload.num_microbatches} microbatches of up to "
            f"{candidate.microbatch_size}",
        ),
        ("devices", f"{surveyed.task.num_devices} x {surveyed.task.cluster.device.name}, {surveyed.threads} threads"),
        ("memory a device may use", "not known" if limit is None else str(limit)),
        ("torch", torch.__version__),
    ]


def unit_shares(task: Task) -> tuple[UnitShare, ...]:
    """Give each unit's part of parameters, time and activations."""
    profile = task.profiles[0]
    sizes = parameter_shares(profile)
    table = task.price(profile, Layout()).table
    return tuple(
        UnitShare(
            name=unit.name,
            parameter_bytes=size,
            seconds=table.seconds(u, u + 1),
            activation_bytes=unit.saved_bytes + unit.saved_input_bytes,
            boundary_bytes=unit.boundary_bytes,
        )
        for u, (unit, size) in enumerate(zip(profile.units, sizes, strict=True))
    )


def _scaling(task: Task, ran: Sequence[LayoutResult]) -> list[ScalingPoint]:
    """Give the best layout on 1, 2, 4, .. devices, as predicted and (where it was run) measured."""
    counts = sorted({task.num_devices, *(1 << k for k in range(12) if 1 << k <= task.num_devices)})
    points = []
    for count in counts:
        fewer = replace(task, num_devices=count)
        found = search(fewer, replace(HERE, recompute=False)).candidates
        if not found:
            continue
        measured = [r for r in ran if r.num_devices == count]
        fastest = min(measured, key=lambda r: r.median or 0.0, default=None)
        chosen = next((c for c in found if fastest is not None and str(c.layout) == fastest.layout), found[0])
        points.append(
            ScalingPoint(
                num_devices=count,
                layout=str(chosen.layout),
                predicted_seconds=chosen.estimate.seconds,
                measured_seconds=None if fastest is None else fastest.median,
            )
        )
    return points


def _sentence(results: Sequence[LayoutResult], best: LayoutResult | None) -> str:
    """Say in one sentence what to take and why."""
    if best is None or best.median is None:
        return "Nothing could be run; see the errors."
    one = next((r for r in results if r.num_devices == 1 and r.median is not None), None)
    text = f"Take {best.layout}: {format_seconds(best.median)} a step"
    if one is not None and one.median and one is not best:
        text += f", {one.median / best.median:.2f} times as fast as one device"
    peak = [bar.measured for bar in best.memory if bar.measured is not None]
    if peak:
        text += f", {format_bytes(max(peak))} on its fullest rank"
    rest = sorted((r for r in results if r is not best and r.num_devices > 1 and r.median), key=lambda r: r.median or 0)
    if rest and rest[0].median:
        text += f"; {rest[0].layout} takes {rest[0].median / best.median:.2f} times as long{_why(rest[0], best)}"
    return text + "."


def _why(other: LayoutResult, best: LayoutResult) -> str:
    names = {"bubble": "its bubble", "communication": "its communication", "optimizer": "its update"}
    lost = {k: other.time_parts.get(k, 0.0) - best.time_parts.get(k, 0.0) for k in names}
    name = max(lost, key=lambda k: lost[k])
    return f", mostly for {names[name]}" if other.median and lost[name] > 0.03 * other.median else ""
