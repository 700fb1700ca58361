"""Settle what training starts with: layout, cuts and microbatch size, as written or as a plan chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import LayoutError
from .job import Job
from .layout import Layout
from .planner.search import Found, consider
from .planning import (
    DistRanks,
    Survey,
    Tell,
    choose,
    make_plan,
    memory_limit,
    microbatch_choices,
    nothing_fits,
    profile_here,
    size_for,
    survey,
    survey_of,
)
from .plans import Candidate, Plan

MEASURED_RUN = 120.0  # seconds; training that is predicted to take longer begins with running the best few layouts


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Hold what training starts with: the job (its microbatch size settled), the layout, and the plan behind it."""

    job: Job
    layout: Layout
    made: Plan | None = None

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """Give the planned cuts, None where nothing was planned or cut."""
        return (self.made.chosen.cuts or None) if self.made is not None else None

    @property
    def notes(self) -> list[str]:
        """Say what was chosen and why, and how to choose it again."""
        return [] if self.made is None else settled_notes(self.job, self.made)


def settled_notes(job: Job, made: Plan) -> list[str]:
    """Give the first sentences of a plan, and what to write to get the same run again."""
    lines = [f"auto: {line}" for line in made.advice[:2]]
    if not isinstance(job.microbatch_size, int):
        return lines
    if f"microbatch_size={job.microbatch_size}" not in " ".join(lines):
        lines.append(f"auto: to repeat this run, put microbatch_size={job.microbatch_size} into the job")
    return lines


def settle(
    job: Job, layout: str | Layout, devices: int | None, *, threads: int, steps: int | None, tell: Tell
) -> Settled:
    """Settle layout and microbatch size before ranks start. Runs of more than MEASURED_RUN seconds are measured first.

    ``steps``: optimizer steps of the run, None where nobody knows.
    """
    from .session import choose_layout

    auto = not isinstance(layout, Layout) and layout.strip() == "auto"
    if not auto and job.microbatch_size != "auto":
        return Settled(job=job, layout=choose_layout(job, layout, devices))
    if auto and job.microbatch_size != "auto" and (devices or _num_devices()) == 1:
        return Settled(job=job, layout=Layout())
    asked = None if auto else Layout.parse(layout, devices=devices)
    surveyed = survey(
        job, devices=devices if asked is None else asked.num_devices, threads=threads, seconds=0.5, tell=tell
    )
    if asked is not None:
        return _settled(job, choose_size(surveyed, asked))
    first = choose(surveyed, measure=False, tell=tell)
    run = float("inf") if steps is None else steps * first.chosen.seconds
    return _settled(job, choose(surveyed, measure=True, tell=tell) if run > MEASURED_RUN else first)


def _settled(job: Job, made: Plan) -> Settled:
    sized = job.with_fields(microbatch_size=size_for(job, made.chosen))
    return Settled(job=sized, layout=made.layout, made=made)


def _num_devices() -> int:
    from .launch.environment import num_devices

    return num_devices()


def choose_size(surveyed: Survey, layout: Layout) -> Plan:
    """Choose the microbatch size under a layout that is given."""
    task = surveyed.task
    tried = [consider(task, p, w, layout) for p, w in zip(task.profiles, task.workloads, strict=True)]
    fits = tuple(sorted((c for c in tried if isinstance(c, Candidate)), key=lambda c: c.estimate.seconds))
    found = Found(candidates=fits, rejected=tuple(r for r in tried if not isinstance(r, Candidate)))
    if not fits:
        raise LayoutError(nothing_fits(surveyed, found))
    return make_plan(surveyed, found)


def plan_among_ranks(job: Job, device: Any, *, threads: int = 1) -> Plan:
    """Choose the layout inside ranks that already run (torchrun). Every rank calls it, all get the same plan."""
    from .launch.environment import detect
    from .probing import probed_among_ranks

    ranks = DistRanks()
    here = detect().local_world_size if detect().world_size > 1 else ranks.world_size
    limits = ranks.tell(memory_limit(here, None))
    limit = min(limits, key=lambda found: found.bytes)
    cluster = probed_among_ranks(device)
    profiles = profile_here(job, device, ranks, microbatch_choices(job), limit.bytes, 0.5)
    made: Any = None
    if ranks.rank == 0:
        try:
            made = choose(survey_of(job, cluster, ranks.world_size, profiles, limit, threads), measure=False)
        except LayoutError as error:
            made = error
    made = ranks.tell(made)[0]
    if isinstance(made, LayoutError):
        raise made
    plan_made: Plan = made
    return plan_made
