"""What a layout costs: a profile, a cluster, a layout and cuts give an estimate of time and memory, term by term."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..grid import slot_ranges, split_evenly
from ..hardware.cluster import Cluster
from ..layout import Layout
from ..plans import Estimate, RankMemory
from ..schedule.replay import Timeline
from .exchange import exchange_seconds, meeting_seconds, transfer_of
from .memory import MemoryRules, Step, gradient_rows, live_bytes, rank_memory
from .profile import CellSeconds, Profile
from .stage import StageCost, StageTable, UnitPrice
from .time import Replayed, replay_stages

NOTHING = CellSeconds(forward=0.0, backward=0.0, backward_input=0.0, backward_weight=0.0)
PIECES = 1.05  # what the C library holds in pieces where a layout allocates in another order than one device; measured
PYTHON_BYTES = 2 * 2**20  # of a rank beside pages of libraries: the program and its code; measured, torch 2.13
CPU_RULES = MemoryRules(
    runtime_bytes=26 * 2**20,  # measured: a rank of a tiny job above a rank with everything imported, torch 2.13
    split_bytes=31 * 2**20,  # measured: torch imports its symbolic shapes where a backward is parted
    mesh_bytes=3 * 2**20,  # measured: pages of libraries and objects that shared memory and messages need
    margin=1.25,  # where no whole step was measured: kernels' own memory and the C library's pieces, 2 to 60 percent
    shares_host=True,
    message_copies=4.0,  # measured: two under way each way, 1f1b
)
GPU_RULES = MemoryRules(
    runtime_bytes=1.0 * 2**30,  # CUDA context and NCCL buffers: 0.5-2 GiB (ml-engineering, training/performance)
    margin=1.05,  # the caching allocator's reserved over allocated memory
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """State what a step holds, as one device would run it.

    ``num_microbatches`` of the profile's size; ``slots`` leaves of the reduction tree; ``clips`` the gradient norm;
    ``coupled``: BatchNorm over the whole batch; ``couples_loss``: the loss needs the whole batch.
    """

    batch_size: int
    num_microbatches: int
    slots: int = 8
    clips: bool = False
    coupled: bool = False
    couples_loss: bool = False

    def most_microbatches(self, dp: int) -> int:
        """Count the microbatches of the replica that has most."""
        return _most_microbatches(self.num_microbatches, max(self.slots, min(dp, self.num_microbatches)), dp)


@functools.lru_cache(maxsize=4096)
def _most_microbatches(num_microbatches: int, slots: int, dp: int) -> int:
    groups = slot_ranges(num_microbatches, slots)
    parts = [(a, b) for a, b in split_evenly(len(groups), dp) if a < b]
    return max(groups[b - 1][1] - groups[a][0] for a, b in parts)


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Hold what one layout family is priced with: units' prices under a tp, and the rules of memory."""

    table: StageTable
    rules: MemoryRules
    notes: tuple[str, ...] = field(default=())


def measured_prices(profile: Profile) -> list[UnitPrice]:
    """Price units by their measured seconds."""
    prices = []
    for unit in profile.units:
        assert unit.seconds is not None, f"unit {unit.name} was not timed"
        prices.append(UnitPrice(seconds=unit.seconds))
    return prices


def fitted_rules(profile: Profile, workload: Workload, rules: MemoryRules) -> MemoryRules:
    """Take what libraries, kernels and the allocator hold from what steps on one device were measured to take.

    What kernels use for themselves and what the C library keeps in pieces differs from model to model: 2 to 60 percent.
    """
    runtime = profile.file_bytes + PYTHON_BYTES if profile.file_bytes else rules.runtime_bytes
    if profile.peak_bytes is None:
        return replace(rules, runtime_bytes=runtime, build_bytes=profile.build_bytes)
    plain = replace(rules, margin=PIECES, runtime_bytes=runtime, build_bytes=0.0, scratch_bytes=0.0)
    few = replace(workload, num_microbatches=profile.peak_microbatches)
    table = StageTable(profile, [UnitPrice(seconds=NOTHING)] * len(profile.units))
    (rank,) = _memory(profile, few, Layout(), cut_stages(table, ()), plain, _rows(few), profile.peak_microbatches)
    scratch = max(0.0, profile.peak_bytes - rank.reserved)
    return replace(plain, scratch_bytes=scratch, build_bytes=profile.build_bytes)


def _rows(workload: Workload) -> tuple[int, int]:
    return gradient_rows(workload.num_microbatches, workload.slots, 1)


def estimate(
    profile: Profile, cluster: Cluster, workload: Workload, layout: Layout, cuts: Sequence[int], pricing: Pricing
) -> Estimate:
    """Estimate one layout with its cuts (first unit of each stage after the first)."""
    stages = cut_stages(pricing.table, cuts)
    count = workload.most_microbatches(layout.dp)
    replayed = _replay(profile, cluster, workload, layout, stages, count)
    exchange = max(exchange_seconds(cluster, layout, stages[r :: layout.pp], count) for r in range(layout.pp))
    top = max(range(layout.pp), key=lambda r: replayed.busy[r])
    mine = stages[top :: layout.pp]
    compute = replayed.busy[top]
    again = sum(s.seconds.forward + s.tensor_forward for s in mine) * count if layout.recompute else 0.0
    tensor = sum(s.tensor_forward + s.tensor_backward for s in mine) * count
    data = min(profile.load_seconds * count, compute)
    rows = rows_of(workload, layout, pricing.rules)
    tail = max(_tail(profile, cluster, layout, stages[r :: layout.pp], count) for r in range(layout.pp))
    parts = {
        "compute": max(0.0, compute - again - tensor - data),
        "recompute": again,
        "tensor": tensor,
        "communication": exchange + replayed.messages,
        "bubble": replayed.bubble,
        "data": data,
        "optimizer": tail,
        "other": profile.begin_seconds + _norm_seconds(cluster, workload, layout) + meeting_seconds(cluster, layout),
    }
    return Estimate(
        seconds=sum(parts.values()),
        time_parts=parts,
        memory=_memory(profile, workload, layout, stages, pricing.rules, rows, count),
        spread=0.1 if cluster.is_here else 0.25,
        notes=pricing.notes,
    )


def timeline_of(
    profile: Profile, cluster: Cluster, workload: Workload, layout: Layout, cuts: Sequence[int], pricing: Pricing
) -> Timeline:
    """Give the predicted timeline of one replica's pipeline, without what comes after it."""
    stages = cut_stages(pricing.table, cuts)
    return _replay(profile, cluster, workload, layout, stages, workload.most_microbatches(layout.dp)).timeline


def memory_of(
    profile: Profile, workload: Workload, layout: Layout, stages: Sequence[StageCost], rules: MemoryRules
) -> tuple[RankMemory, ...]:
    """Give the memory of each pipeline rank under a layout cut into ``stages``."""
    rows = rows_of(workload, layout, rules)
    return _memory(profile, workload, layout, stages, rules, rows, workload.most_microbatches(layout.dp))


def rows_of(workload: Workload, layout: Layout, rules: MemoryRules) -> tuple[int, int]:
    """Give how many gradients of the whole stage are held at once, see :func:`gradient_rows`."""
    if not rules.keeps_partial_sums:
        return 1, 1
    return gradient_rows(workload.num_microbatches, _slots(workload, layout), layout.dp)


def _slots(workload: Workload, layout: Layout) -> int:
    return max(workload.slots, min(layout.dp, workload.num_microbatches))


def cut_stages(table: StageTable, cuts: Sequence[int]) -> list[StageCost]:
    """Give the stages between cuts."""
    edges = [0, *cuts, len(table.units)]
    return [table.stage(a, b) for a, b in itertools.pairwise(edges)]


def _replay(
    profile: Profile, cluster: Cluster, workload: Workload, layout: Layout, stages: Sequence[StageCost], count: int
) -> Replayed:
    """Replay the program; where ranks slow one another down, those that wait do not."""
    run = functools.partial(
        replay_stages,
        stages,
        layout,
        count,
        transfer_of(cluster, layout, stages),
        load=profile.load_seconds,
        coupled=workload.coupled,
        couple_loss=workload.couples_loss,
        couple=couple_seconds(cluster, layout),
    )
    if profile.contention == 1.0 or (layout.pp == 1 and layout.dp > 1):
        return run()
    if layout.num_devices == 1:
        return run(slow=[1 / profile.contention])
    return run(slow=_slow(profile.contention, run(), layout))


def _slow(contention: float, replayed: Replayed, layout: Layout) -> list[float]:
    """Give each rank its share of the time that was taken with all ranks busy: while others wait it is faster."""
    share = [b / replayed.seconds if replayed.seconds else 1.0 for b in replayed.busy]
    found = []
    for r in range(layout.pp):
        others = [s for k, s in enumerate(share) if k != r]
        active = min(1.0, sum(others) / len(others))
        found.append((1 + (contention - 1) * active) / contention)
    return found


def couple_seconds(cluster: Cluster, layout: Layout) -> float:
    """Give the time of one coupled row's exchange between replicas: small messages both ways."""
    table = cluster.table("message", 2)
    return 0.0 if layout.dp == 1 else 2 * (table.seconds(1024) if table else 5e-5)  # 50 us: two processes of a host


def _norm_seconds(cluster: Cluster, workload: Workload, layout: Layout) -> float:
    return couple_seconds(cluster, replace(layout, dp=2)) if workload.clips and layout.num_devices > 1 else 0.0


def _tail(profile: Profile, cluster: Cluster, layout: Layout, stages: Sequence[StageCost], count: int) -> float:
    """Give one rank's time to add partial sums up and to update its parameters."""
    whole = sum(p.num_bytes for p in profile.parameters.values() if p.trainable) or 1
    mine = sum(s.gradient_bytes for s in stages) / whole
    update = profile.update_seconds
    if not update and not cluster.is_here:
        touched = sum(s.optimizer_bytes * 2 + s.gradient_bytes + s.parameter_bytes * 2 for s in stages)
        shard = layout.dp if layout.zero else 1
        return touched / shard / cluster.device.bytes_per_second
    shared = layout.dp if cluster.is_here or layout.zero else 1
    return update * mine / shared + profile.accumulate_seconds * mine * max(0, count - 1)


def _memory(
    profile: Profile,
    workload: Workload,
    layout: Layout,
    stages: Sequence[StageCost],
    rules: MemoryRules,
    rows: tuple[int, int],
    count: int,
) -> tuple[RankMemory, ...]:
    coupled = workload.coupled or workload.couples_loss
    cells = live_bytes(stages, layout, count, coupled=coupled, blockwise=rules.blockwise)
    step = Step(
        rows=rows,
        num_microbatches=count,
        buffers=profile.buffer_bytes,
        batch=profile.batch_bytes,
        coupled=workload.coupled,
    )
    return tuple(
        rank_memory(stages[r :: layout.pp], cells[r], layout, rules, step, pp_index=r) for r in range(layout.pp)
    )
