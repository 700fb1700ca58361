"""Settle what training starts with: layout, cuts and microbatch size, as written or as a plan chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import LayoutError
from .events import Tell
from .job import Job
from .layout import Layout, is_auto
from .planner.search import Found, consider
from .planning import (
    Survey,
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
    """Hold what training starts with: the job (its microbatch size settled), the layout, and the plan behind it.

    ``sized``: the microbatch size was left open by the job.
    """

    job: Job
    layout: Layout
    made: Plan | None = None
    sized: bool = False

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """Give the planned cuts, None where nothing was planned or cut."""
        return (self.made.chosen.cuts or None) if self.made is not None else None

    @property
    def notes(self) -> list[str]:
        """Say what was chosen and why, and how to choose it again."""
        if self.made is None:
            return []
        lines = [f"auto: {line}" for line in self.made.advice[:2]]
        if self.sized:
            lines.append(f"auto: to repeat this run, put microbatch_size={self.job.microbatch_size} into the job")
        return lines


def settle(
    job: Job, layout: str | Layout, devices: int | None, *, threads: int, steps: int | None, tell: Tell
) -> Settled:
    """Settle layout and microbatch size before ranks start. Runs of more than MEASURED_RUN seconds are measured first.

    ``steps``: optimizer steps of the run, None where nobody knows.
    """
    from .session import choose_layout

    auto = is_auto(layout)
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
    return Settled(job=sized, layout=made.layout, made=made, sized=job.microbatch_size == "auto")


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


def settle_among_ranks(job: Job, layout: str | Layout, device: Any, *, threads: int = 1) -> Settled:
    """Settle layout and microbatch size inside ranks that already run (torchrun). Every rank calls it, for the same."""
    from .launch.environment import detect
    from .launch.group import OpenGroup
    from .probing import probed_among_ranks

    ranks = OpenGroup()
    here = detect().local_world_size if detect().world_size > 1 else ranks.world_size
    limit = min(ranks.tell(memory_limit(here, None)), key=lambda found: found.bytes)
    cluster = probed_among_ranks(device)
    profiles = profile_here(job, device, ranks, microbatch_choices(job), limit.bytes, 0.5)
    made: Plan | LayoutError | None = None
    if ranks.rank == 0:
        surveyed = survey_of(job, cluster, ranks.world_size, profiles, limit, threads)
        try:
            made = (
                choose(surveyed, measure=False)
                if is_auto(layout)
                else choose_size(surveyed, Layout.parse(layout, devices=ranks.world_size))
            )
        except LayoutError as error:
            made = error
    found = ranks.tell(made)[0]
    if isinstance(found, LayoutError):
        raise found
    return _settled(job, found)
