"""Price every layout, keep those that fit, and rank them; each that does not keeps its reason with the numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..cost.blocks import block_ranges
from ..cost.estimate import Pricing, Workload, cut_stages, estimate, memory_of, rows_of
from ..cost.exchange import transfer_of
from ..cost.memory import Step, live_bytes, rank_memory
from ..cost.profile import Profile
from ..cost.stage import StageCost, StageTable
from ..hardware.cluster import Cluster
from ..layout import Layout
from ..plans import Candidate, RankMemory, Rejection
from ..quantities import format_bytes
from .space import Space, illegal, layouts
from .stages import Fits, best_cuts, improved

REFINED_STAGES = 8  # up to here cuts are improved on the replayed step
MANY_UNITS = 150  # beyond, cuts are made between whole layers
MOST_REPLAYED = 24  # layouts of a cluster elsewhere that are replayed


@dataclass(frozen=True, kw_only=True)
class Task:
    """State what is to be planned: one profile for each microbatch size that may be taken.

    ``price(profile, layout)`` gives prices and memory rules for a layout. ``limit_bytes``: what one device may use.
    ``fixed_cuts``: the first units of stages, where the job names them; ``named_stages``: how many it then has.
    ``headroom``: how much room a rank must have
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
    named_stages: int = 0
    headroom: float = 1.0

    def inputs(self, microbatch_size: int | None) -> tuple[Profile, Workload]:
        """Give the profile and the workload at a microbatch size, the first ones where there is none of it."""
        pairs = list(zip(self.profiles, self.workloads, strict=True))
        return next((pair for pair in pairs if pair[0].microbatch_size == microbatch_size), pairs[0])

    def fits(self, num_bytes: float) -> bool:
        """Tell whether a rank that is predicted to hold so much may be started."""
        return self.limit_bytes is None or num_bytes * self.headroom <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """Hold the outcome of a search: candidates that fit, fastest first, and the rejected."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, kw_only=True)
class Option:
    """Hold a legal layout that fits, before it is replayed: ``bound`` is what no schedule of its stages can beat."""

    profile: Profile
    workload: Workload
    layout: Layout
    pricing: Pricing
    cuts: tuple[int, ...]
    bound: float


def search(task: Task, space: Space) -> Found:
    """Price all layouts. The same input gives the same outcome.

    On a cluster that is not here there may be thousands: those whose busiest rank alone takes longer than the best
    whole step are not replayed, and at most MOST_REPLAYED are.
    """
    options: list[Option] = []
    rejected: dict[str, Rejection] = {}
    for profile, workload in zip(task.profiles, task.workloads, strict=True):
        for layout in layouts(task.num_devices, task.cluster, space):
            found = weigh(task, profile, workload, layout)
            if isinstance(found, Rejection):
                rejected.setdefault(found.layout, found)
            else:
                options.append(found)
    options.sort(key=lambda o: (o.bound, str(o.layout), o.profile.microbatch_size))
    candidates: list[Candidate] = []
    best = float("inf")
    for option in options:
        if not task.cluster.is_here and (option.bound > best or len(candidates) >= MOST_REPLAYED):
            break
        full = too_full(task, option)
        if full is not None:
            rejected.setdefault(full.layout, full)
            continue
        candidates.append(_replayed(task, option))
        best = min(best, candidates[-1].estimate.seconds)
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
    option = weigh(task, profile, workload, layout)
    if isinstance(option, Rejection):
        return option
    return too_full(task, option) or _replayed(task, option)


def weigh(task: Task, profile: Profile, workload: Workload, layout: Layout) -> Option | Rejection:
    """Cut one layout, and say what its busiest rank computes at least."""
    pricing = task.price(profile, layout)
    rows = len(cut_rows(pricing.table)) if layout.pp > 1 else 1
    wrong = illegal(
        layout, rows, workload, is_here=task.cluster.is_here, blocked=task.blocked, named_stages=task.named_stages
    )
    if wrong is not None:
        return wrong
    cuts = _cuts(task, profile, workload, layout, pricing)
    stages = cut_stages(pricing.table, cuts)
    bound = least_seconds(stages, layout, workload.most_microbatches(layout.dp))
    return Option(profile=profile, workload=workload, layout=layout, pricing=pricing, cuts=cuts, bound=bound)


def too_full(task: Task, option: Option) -> Rejection | None:
    """Say why a layout does not fit in memory, None where it does."""
    if task.limit_bytes is None:
        return None
    stages = cut_stages(option.pricing.table, option.cuts)
    memory = memory_of(option.profile, option.workload, option.layout, stages, option.pricing.rules)
    if task.fits(max(rank.reserved for rank in memory)):
        return None
    reason = too_large(memory, task.limit_bytes, task.headroom)
    return Rejection(layout=str(option.layout), reason=reason, held_bytes=max(rank.reserved for rank in memory))


def least_seconds(stages: Sequence[StageCost], layout: Layout, num_microbatches: int) -> float:
    """Give what no schedule can beat: a rank begins after the stages before its first, and they end after it."""
    forward = [s.seconds.forward + s.tensor_forward for s in stages]
    again = forward if layout.recompute else [0.0] * len(stages)
    weight = [s.seconds.backward_weight for s in stages]
    whole = [f + a + s.seconds.backward + s.tensor_backward for f, a, s in zip(forward, again, stages, strict=True)]
    least, before = 0.0, 0.0
    for r in range(layout.pp):
        least = max(least, before + num_microbatches * sum(whole[r :: layout.pp]))
        before += whole[r] - weight[r]
    return least


def _replayed(task: Task, option: Option) -> Candidate:
    return Candidate(
        layout=option.layout,
        microbatch_size=option.profile.microbatch_size,
        cuts=option.cuts,
        estimate=estimate(option.profile, task.cluster, option.workload, option.layout, option.cuts, option.pricing),
        stages=name_stages(option.profile, option.cuts),
    )


def too_large(memory: Sequence[RankMemory], limit: float, headroom: float = 1.0) -> str:
    """Say by how much a layout does not fit, and which part is largest."""
    over = [r for r, rank in enumerate(memory) if rank.reserved * headroom > limit]
    rank = max(memory, key=lambda m: m.reserved)
    name, largest = max(rank.parts.items(), key=lambda item: item[1])
    where = "every rank" if len(over) == len(memory) else f"stage {', '.join(map(str, over))}"
    singular = {"optimizer": "optimizer state is", "workspace": "workspace is", "runtime": "the runtime is"}
    kind = singular.get(name, f"{name} are")
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
    rows = cut_rows(pricing.table)
    cuts = _cuts_by_time(task, layout, pricing, rows)
    if not task.cluster.is_here:  # thousands of layouts, alike layers: the fastest cut is as good for memory
        return cuts
    memory = memory_of(profile, workload, layout, cut_stages(pricing.table, cuts), pricing.rules)
    held = [rank.reserved for rank in memory]
    could = task.fits(sum(held) / len(held))  # not even as much on every rank
    if not task.fits(max(held)) and not could:
        return cuts
    if not task.fits(max(held)):
        fits = _fits(task, profile, workload, layout, pricing)
        costs, handed = _row_costs(task, layout, pricing, rows)
        found = best_cuts(
            costs, layout.num_stages, handed=handed, fits=lambda s, a, b: fits(s, rows[a][0], rows[b - 1][1])
        )
        # where no cut fits, the estimate of the fastest says by how much
        return cuts if found is None else tuple(rows[c][0] for c in found)
    if layout.num_stages <= REFINED_STAGES:
        count = len(pricing.table.units)
        cuts = improved(cuts, count, lambda c: _seconds(task, profile, workload, layout, pricing, c))
    return cuts


def cut_rows(table: StageTable) -> list[tuple[int, int]]:
    """Give the runs of units between which is cut: single units, or whole layers where there are very many units."""
    if not table.rows:
        single = [(u, u + 1) for u in range(len(table.units))]
        table.rows = single if len(single) <= MANY_UNITS else block_ranges(table.profile)
    return table.rows


def _cuts_by_time(task: Task, layout: Layout, pricing: Pricing, rows: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Give the cut whose slowest stage is fastest; found once for a table, a number of stages and a way to hand on."""
    key = (layout.num_stages, layout.pp > 1 and layout.tp)
    known = pricing.table.cuts
    if key not in known:
        costs, handed = _row_costs(task, layout, pricing, rows)
        found = best_cuts(costs, layout.num_stages, handed=handed)
        assert found is not None
        known[key] = tuple(rows[c][0] for c in found)
    return known[key]


def _row_costs(
    task: Task, layout: Layout, pricing: Pricing, rows: Sequence[tuple[int, int]]
) -> tuple[list[float], list[float]]:
    """Price each run of units, and handing on behind it."""
    table = pricing.table
    costs = [table.seconds(a, b) for a, b in rows]
    pieces = [table.stage(b - 1, b) for _, b in rows]
    transfer = transfer_of(task.cluster, layout, [*pieces, pieces[-1]])
    return costs, [a + b for a, b in zip(transfer.link, transfer.send, strict=True)]


def _seconds(
    task: Task, profile: Profile, workload: Workload, layout: Layout, pricing: Pricing, cuts: tuple[int, ...]
) -> float:
    estimated = estimate(profile, task.cluster, workload, layout, cuts, pricing)
    if not task.fits(estimated.peak_bytes):
        return float("inf")
    return estimated.seconds


def _fits(task: Task, profile: Profile, workload: Workload, layout: Layout, pricing: Pricing) -> Fits:
    """Give the test whether one stage fits on its rank: early stages of 1f1b keep more microbatches alive."""
    count = workload.most_microbatches(layout.dp)
    step = Step(
        rows=rows_of(workload, layout, pricing.rules),
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
            cells = live_bytes(
                [cost] * layout.num_stages, layout, count, coupled=coupled, blockwise=pricing.rules.blockwise
            )[stage % layout.pp]
            held = rank_memory([cost] * layout.virtual, cells, layout, pricing.rules, step, pp_index=stage % layout.pp)
            known[key] = task.fits(held.reserved)
        return known[key]

    return fits
