"""Price every layout, keep those that fit, and rank them; each that does not keeps its reason with the numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..cost.estimate import Pricing, Workload, cut_stages, estimate
from ..cost.exchange import transfer_of
from ..cost.memory import Step, gradient_rows, live_bytes, rank_memory
from ..cost.profile import Profile
from ..hardware.cluster import Cluster
from ..layout import Layout
from ..plan import Candidate, Estimate, Rejection
from ..quantities import format_bytes
from .space import Space, illegal, layouts
from .stages import Fits, best_cuts, improved

REFINED_STAGES = 8  # up to here cuts are improved on the replayed step


@dataclass(frozen=True, kw_only=True)
class Task:
    """State what is to be planned: one profile for each microbatch size that may be taken.

    ``price(profile, layout)`` gives prices and memory rules for a layout. ``limit_bytes``: what one device may use.
    ``fixed_cuts``: the first units of stages, where the job names them. ``headroom``: how much room a rank must have
    beyond what is predicted (1.1: ten percent).
    """

    profiles: Sequence[Profile]
    workloads: Sequence[Workload]  # one for each profile
    cluster: Cluster
    num_devices: int
    price: Callable[[Profile, Layout], Pricing]
    limit_bytes: float | None = None
    blocked: str = ""
    fixed_cuts: Callable[[int], tuple[int, ...] | None] = field(default=lambda stages: None)
    headroom: float = 1.0

    def fits(self, num_bytes: float) -> bool:
        """Tell whether a rank that is predicted to hold so much may be started."""
        return self.limit_bytes is None or num_bytes * self.headroom <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """Hold the outcome of a search: candidates that fit, fastest first, and the rejected."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]


def search(task: Task, space: Space) -> Found:
    """Price all layouts. The same input gives the same outcome."""
    candidates: list[Candidate] = []
    rejected: dict[str, Rejection] = {}
    for profile, workload in zip(task.profiles, task.workloads, strict=True):
        for layout in layouts(task.num_devices, task.cluster, space):
            found = consider(task, profile, workload, layout)
            if isinstance(found, Rejection):
                rejected.setdefault(found.layout, found)
            else:
                candidates.append(found)
    fits = {str(c.layout) for c in candidates}
    ordered = sorted(
        candidates, key=lambda c: (c.estimate.seconds, c.estimate.peak_bytes, str(c.layout), c.microbatch_size)
    )
    return Found(
        candidates=tuple(_without_vain_recompute(ordered)),
        rejected=tuple(r for r in rejected.values() if r.layout not in fits),
    )


def _without_vain_recompute(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leave out recompute where the same layout fits without it."""
    plain = {(str(c.layout), c.microbatch_size) for c in candidates if not c.layout.recompute}
    return [
        c
        for c in candidates
        if not c.layout.recompute or (str(replace(c.layout, recompute=False)), c.microbatch_size) not in plain
    ]


def consider(task: Task, profile: Profile, workload: Workload, layout: Layout) -> Candidate | Rejection:
    """Price one layout: its best cut and estimate, or why it cannot be taken."""
    wrong = illegal(layout, profile, workload, is_here=task.cluster.is_here, blocked=task.blocked)
    if wrong is not None:
        return wrong
    pricing = task.price(profile, layout)
    cuts = _cuts(task, profile, workload, layout, pricing)
    estimated = estimate(profile, task.cluster, workload, layout, cuts, pricing)
    if task.limit_bytes is not None and not task.fits(estimated.peak_bytes):
        return Rejection(layout=str(layout), reason=too_large(estimated, task.limit_bytes, task.headroom))
    return Candidate(
        layout=layout,
        microbatch_size=profile.microbatch_size,
        cuts=cuts,
        estimate=estimated,
        stages=name_stages(profile, cuts),
    )


def too_large(estimated: Estimate, limit: float, headroom: float = 1.0) -> str:
    """Say by how much a layout does not fit, and which part is largest."""
    over = [r for r, rank in enumerate(estimated.memory) if rank.reserved * headroom > limit]
    rank = max(estimated.memory, key=lambda m: m.reserved)
    name, largest = max(rank.parts.items(), key=lambda item: item[1])
    where = "every rank" if len(over) == len(estimated.memory) else f"stage {', '.join(map(str, over))}"
    kind = {"optimizer": "optimizer state is", "workspace": "workspace is"}.get(name, f"{name} are")
    more = f" (and {headroom - 1:.0%} to be safe)" if rank.reserved <= limit else ""
    return (
        f"{format_bytes(rank.reserved)}{more} of {format_bytes(limit)} on {where}; {kind} {format_bytes(largest)} of it"
    )


def name_stages(profile: Profile, cuts: Sequence[int]) -> tuple[str, ...]:
    """Say in words what each stage holds."""
    edges = [0, *cuts, len(profile.units)]
    names = []
    for first, last in itertools.pairwise(edges):
        a, b = profile.units[first].name or "the model", profile.units[last - 1].name or "the model"
        names.append(a if last - first == 1 else f"{a} .. {b} ({last - first} units)")
    return tuple(names)


def _cuts(task: Task, profile: Profile, workload: Workload, layout: Layout, pricing: Pricing) -> tuple[int, ...]:
    """Choose the cut of a layout: by time, and by memory where that cut does not fit."""
    if layout.num_stages == 1:
        return ()
    named = task.fixed_cuts(layout.num_stages)
    if named is not None:
        return named
    table = pricing.table
    costs = [table.seconds(u, u + 1) for u in range(len(table.units))]
    handed = _handed(task, profile, layout, pricing)
    cuts = best_cuts(costs, layout.num_stages, handed=handed)
    assert cuts is not None
    if task.limit_bytes is not None and not _all_fit(task, profile, workload, layout, pricing, cuts):
        fits = _fits(task, profile, workload, layout, pricing)
        found = best_cuts(costs, layout.num_stages, handed=handed, fits=fits)
        return cuts if found is None else found  # the estimate says by how much it does not fit
    if layout.num_stages <= REFINED_STAGES:
        cuts = improved(cuts, len(costs), lambda c: _seconds(task, profile, workload, layout, pricing, c))
    return cuts


def _seconds(
    task: Task, profile: Profile, workload: Workload, layout: Layout, pricing: Pricing, cuts: tuple[int, ...]
) -> float:
    estimated = estimate(profile, task.cluster, workload, layout, cuts, pricing)
    if not task.fits(estimated.peak_bytes):
        return float("inf")
    return estimated.seconds


def _handed(task: Task, profile: Profile, layout: Layout, pricing: Pricing) -> list[float]:
    """Price handing on behind every unit, as if a stage ended there."""
    table = pricing.table
    pieces = [table.stage(u, u + 1) for u in range(len(table.units))]
    transfer = transfer_of(task.cluster, layout, [*pieces, pieces[-1]])
    return [a + b for a, b in zip(transfer.link, transfer.send, strict=True)]


def _all_fit(
    task: Task, profile: Profile, workload: Workload, layout: Layout, pricing: Pricing, cuts: tuple[int, ...]
) -> bool:
    return task.fits(estimate(profile, task.cluster, workload, layout, cuts, pricing).peak_bytes)


def _fits(task: Task, profile: Profile, workload: Workload, layout: Layout, pricing: Pricing) -> Fits:
    """Give the test whether one stage fits on its rank: early stages of 1f1b keep more microbatches alive."""
    count = workload.most_microbatches(layout.dp)
    step = Step(
        rows=gradient_rows(workload.num_microbatches, max(workload.slots, layout.dp), layout.dp),
        num_microbatches=count,
        buffers=profile.buffer_bytes,
        batch=profile.batch_bytes,
        coupled=workload.coupled,
    )
    coupled = workload.coupled or workload.couples_loss
    known: dict[tuple[int, int, int], bool] = {}

    def fits(stage: int, first: int, last: int) -> bool:
        key = (stage, first, last)
        if key not in known:
            cost = pricing.table.stage(first, last)
            cells = live_bytes([cost] * layout.num_stages, layout, count, coupled=coupled)[stage % layout.pp]
            held = rank_memory([cost] * layout.virtual, cells, layout, pricing.rules, step, pp_index=stage % layout.pp)
            known[key] = task.fits(held.reserved)
        return known[key]

    return fits


__all__ = ["Found", "Task", "consider", "cut_stages", "search", "too_large"]
