"""The peak memory of each pipeline rank, part by part: what stays, what the program keeps alive, what a cell adds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..grid import Range, TreeStack, slot_ranges, split_evenly, tree_cover
from ..layout import Layout
from ..plans import RankMemory
from ..schedule.actions import Action, Op
from ..schedule.library import build_program
from .stage import StageCost

SPLIT_SHARE = 0.5  # of what a cell saved: gradients of layers' outputs, kept for the second half of a parted backward
SHARE_STEP = 4096  # bytes; replicas' shares of a row end at whole pages


@dataclass(frozen=True, kw_only=True)
class MemoryRules:
    """State what a runtime adds to the tensors of a job.

    ``runtime_bytes``: a rank before it holds any tensor of the model (pages of libraries, the program);
    ``split_bytes``: more of it on ranks that part a backward in two (zero-bubble); ``mesh_bytes``: on every rank where
    there are several. ``build_bytes``: what building the
    whole model and looking into it leaves in the allocator: ranks hold that much even if their stage needs less.
    ``scratch_bytes``: what kernels use for themselves and what the allocator keeps in pieces; ``margin``: by how much
    it holds more than is alive. ``shares_host``: replicas of a host share parameters and gradients in memory (each
    process counts what it touches). ``keeps_partial_sums``: the exact reduction keeps partial sums of the tree.
    ``message_copies``: how many messages are under way at once over each boundary, both directions together.
    ``blockwise``: recompute runs the model's blocks again one by one, and keeps what each took.
    """

    runtime_bytes: float = 0.0
    split_bytes: float = 0.0
    mesh_bytes: float = 0.0
    build_bytes: float = 0.0
    scratch_bytes: float = 0.0
    margin: float = 1.0
    shares_host: bool = False
    keeps_partial_sums: bool = True
    message_copies: float = 0.0
    blockwise: bool = False


@functools.lru_cache(maxsize=1024)
def partial_sums(total: int, low: int, high: int) -> int:
    """Count the most gradients of the whole model that slots ``[low, high)`` of a tree keep at once."""
    if low >= high:
        return 1
    nodes: dict[Range, float] = {}
    stack, most = TreeStack(total, low, high), 0
    for slot in range(low, high):
        most = max(most, len(nodes) + 1)  # the gradient that a backward makes beside those that wait
        stack.push(nodes, slot, 0.0, lambda a, b: a + b)
    return most


def gradient_rows(num_microbatches: int, slots: int, dp: int) -> tuple[int, int]:
    """Give for the replica that keeps most: gradients at once, and how many of them are whole nodes of the tree."""
    groups = slot_ranges(num_microbatches, slots)
    ranges = split_evenly(len(groups), dp)
    covers = max(max(1, len(tree_cover(len(groups), *r))) for r in ranges)
    return max(partial_sums(len(groups), *r) for r in ranges), covers


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Hold what the cells of one pipeline rank keep: bytes at the peak, and how many microbatches that is."""

    held: float
    extra: float  # what the running cell adds at the peak
    live: int


def live_bytes(
    stages: Sequence[StageCost],
    layout: Layout,
    num_microbatches: int,
    *,
    coupled: bool = False,
    blockwise: bool = False,
) -> tuple[Cells, ...]:
    """Walk each rank's program and give its peak of activations; order alone decides it, no clock.

    ``coupled``: every row needs all microbatches, so all are alive when the backward begins, as under gpipe.
    ``blockwise``: recompute keeps what each block took, not each stage.
    """
    schedule = "gpipe" if coupled else layout.schedule
    moments = live_moments(schedule, layout.pp, layout.virtual, _enough(schedule, layout.num_stages, num_microbatches))
    return tuple(_peak(each, stages[r :: layout.pp], layout, blockwise) for r, each in enumerate(moments))


def _enough(schedule: str, num_stages: int, num_microbatches: int) -> int:
    """Give a number of microbatches with the same peak: but for gpipe, what is alive soon stays as it is."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, 2 * num_stages)


@dataclass(frozen=True, slots=True)
class Moment:
    """Hold a moment at which most is alive: cells of each own stage, beside the one that runs, and what that is."""

    live: tuple[int, ...]
    running: int
    forward: bool


@functools.lru_cache(maxsize=512)
def live_moments(schedule: str, pp: int, virtual: int, num_microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """Give for each rank the moments of a program that may be its peak (none is below another in every stage)."""
    program = build_program(schedule, num_ranks=pp, num_microbatches=num_microbatches, virtual=virtual, tail=False)
    return tuple(tuple(_highest(_moments(actions, pp, virtual))) for actions in program)


def _moments(actions: Iterable[Action], pp: int, virtual: int) -> Iterator[Moment]:
    live = [0] * virtual
    for action in actions:
        if action.stage < 0:
            continue
        own = action.stage // pp
        if action.op is Op.FORWARD:
            yield Moment(tuple(live), own, True)
            live[own] += 1
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            yield Moment((*live[:own], live[own] - 1, *live[own + 1 :]), own, False)
        if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            live[own] -= 1


def _highest(moments: Iterable[Moment]) -> list[Moment]:
    kept: list[Moment] = []
    for new in dict.fromkeys(moments):
        if any(_below(new, old) for old in kept):
            continue
        kept = [old for old in kept if not _below(old, new)] + [new]
    return kept


def _below(one: Moment, other: Moment) -> bool:
    same = one.running == other.running and one.forward == other.forward
    return same and all(a <= b for a, b in zip(one.live, other.live, strict=True))


def _peak(moments: Iterable[Moment], stages: Sequence[StageCost], layout: Layout, blockwise: bool) -> Cells:
    """Give the moment with most bytes."""
    kept = [kept_bytes(stage, layout, blockwise) for stage in stages]
    best = Cells(held=0.0, extra=0.0, live=0)
    for moment in moments:
        held = sum(n * k for n, k in zip(moment.live, kept, strict=True))
        stage = stages[moment.running]
        extra = stage.forward_peak_bytes if moment.forward else stage.backward_peak_bytes
        if layout.schedule == "zero-bubble" and not moment.forward:
            extra += SPLIT_SHARE * stage.held_bytes
        live = sum(moment.live) + 1
        if held + extra > best.held + best.extra:
            best = Cells(held=held, extra=extra, live=max(live, best.live))
        else:
            best = Cells(held=best.held, extra=best.extra, live=max(live, best.live))
    return best


def kept_bytes(stage: StageCost, layout: Layout, blockwise: bool = False) -> float:
    """Give what a cell keeps until its backward: with recompute only what it took and gave (or its blocks took)."""
    if layout.recompute and not blockwise:
        return stage.taken_bytes + stage.given_bytes
    return stage.held_bytes


@dataclass(frozen=True, kw_only=True)
class Step:
    """State what memory depends on beside stages and layout.

    ``rows`` are those of :func:`gradient_rows`, ``num_microbatches`` those of the replica that has most, ``coupled``
    says that the step goes through the model layer by layer (so that gradients are added up there and then).
    """

    rows: tuple[int, int]
    num_microbatches: int
    buffers: float
    batch: float
    coupled: bool = False


def rank_memory(
    stages: Sequence[StageCost], cells: Cells, layout: Layout, rules: MemoryRules, step: Step, *, pp_index: int
) -> RankMemory:
    """Add up the peak of one pipeline rank, of its fullest replica."""
    parameters = sum(s.parameter_bytes for s in stages)
    optimizer = sum(s.optimizer_bytes for s in stages)
    kept, fresh = _gradients(stages, rules, step)
    dp, zero = layout.dp, layout.zero
    gathered = max((s.largest_bytes for s in stages), default=0.0)
    messages = _messages(stages, layout, rules, step)
    if rules.shares_host and dp > 1:  # parameters are mapped twice, and whoever publishes them touches all of both
        mapped = 2 * parameters, kept * (1 + (dp - 1) / dp)
        state = optimizer / dp + (SHARE_STEP * optimizer / parameters if parameters else 0.0)
        held, grads = mapped[0], mapped[1] + fresh
        outside = sum(mapped) + messages
    else:
        held = parameters / dp + gathered if zero == 3 else parameters
        grads = (kept + fresh) / dp + gathered if zero >= 2 else kept + fresh
        state = optimizer / dp if zero >= 1 else optimizer
        outside = messages
    split = rules.split_bytes if layout.schedule == "zero-bubble" and pp_index else 0.0
    parts = {
        "parameters": held,
        "gradients": grads,
        "optimizer": state,
        "activations": cells.held,
        "workspace": cells.extra + messages,
        "buffers": step.buffers + step.batch * max(1, cells.live),
        "runtime": rules.runtime_bytes + split + (rules.mesh_bytes if layout.num_devices > 1 else 0.0),
    }
    inside = sum(parts.values()) - parts["runtime"] - outside
    reserved = parts["runtime"] + outside + max(rules.build_bytes, rules.margin * inside + rules.scratch_bytes)
    return RankMemory(parts=parts, reserved=reserved, live_microbatches=cells.live)


def _gradients(stages: Sequence[StageCost], rules: MemoryRules, step: Step) -> tuple[float, float]:
    """Give the bytes of gradients that are kept through a step, and of those that are made and added to them."""
    gradients = sum(s.gradient_bytes for s in stages)
    most, nodes = step.rows if rules.keeps_partial_sums else (1, 1)
    if step.coupled:
        return gradients * nodes, (most - nodes) * max(s.largest_gradient_bytes for s in stages)
    made = max(s.gradient_bytes for s in stages)  # by the cell that runs, of one of the rank's stages
    return gradients * nodes, gradients * max(0, most - nodes - 1) + (made if most > nodes else 0.0)


def _messages(stages: Sequence[StageCost], layout: Layout, rules: MemoryRules, step: Step) -> float:
    """Give the bytes of the messages that are under way; under gpipe a sender runs ahead."""
    if layout.pp == 1:
        return 0.0
    ahead = min(3, step.num_microbatches) / 2 if layout.schedule == "gpipe" or step.coupled else 1.0
    return rules.message_copies * ahead * sum(s.taken_bytes + s.given_bytes for s in stages)
