"""The schedules: pure functions from the shape of a step to the program of every pipeline rank.

Two stages, four microbatches, drawn by ``replay.draw`` (letters as in ``actions.py``)::

    gpipe         rank 0 |F0 F1 F2 F3 .........B0--- B1--- B2--- B3---
                  rank 1 |...F0 F1 F2 F3 B0--- B1--- B2--- B3---

    1f1b          rank 0 |F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3---
                  rank 1 |...F0 B0--- F1 B1--- F2 B2--- F3 B3---

    zero-bubble   rank 0 |F0 F1 ...B0--- F2 B1--- F3 B2--- B3---
                  rank 1 |...F0 I0 W0 F1 I1 W1 F2 I2 F3 I3 W2 W3

    interleaved   as 1f1b, with ``virtual`` smaller stages on each rank: the bubble is ``virtual`` times
                  shorter (where p divides the number of microbatches)

In every schedule the backwards of a stage run in increasing microbatch order: bitwise sums rely on it.
Where samples of different microbatches meet inside the model or the loss, every schedule becomes the
gpipe order, with a barrier between the segments of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwise.errors import LayoutError
from meshwise.schedule.actions import Action, Op, Program, rank_of_stage

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

Cell = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Hold the shape of one replica's step."""

    num_ranks: int
    num_microbatches: int
    virtual: int
    segments: tuple[int, ...]  # number of segments of each stage
    couple_loss: bool

    @property
    def last_stage(self) -> int:
        return self.num_ranks * self.virtual - 1

    def stages(self, rank: int) -> range:
        return range(rank_of_stage(rank, self.num_ranks), self.last_stage + 1, self.num_ranks)

    def coupled(self) -> bool:
        return self.couple_loss or max(self.segments) > 1


def build_program(
    schedule: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual: int = 1,
    segments: Sequence[int] = (),
    couple_loss: bool = False,
    tail: bool = True,
) -> Program:
    """Build what each of ``num_ranks`` pipeline ranks of one replica does in one step.

    ``virtual`` is the number of stages a rank; ``segments[s]`` the number of segments that coupled rows
    cut stage s in (default 1 each); ``couple_loss`` says that the loss needs the whole batch; ``tail``
    appends REDUCE, CLIP and UPDATE. A replica without microbatches holds only the tail.
    Raises LayoutError, with the rule, for settings that no program exists for.

    Sources: gpipe arXiv:1811.06965, 1f1b and interleaved arXiv:2104.04473, zero-bubble (ZB-H1)
    arXiv:2401.10241.
    """
    _check_schedule(schedule, virtual)
    _check_sizes(num_ranks, num_microbatches, virtual)
    grid = _Grid(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual=virtual,
        segments=_checked_segments(segments, num_ranks * virtual),
        couple_loss=couple_loss,
    )
    actions_of_rank = _gpipe if grid.coupled() else _BUILDERS[schedule]
    ending = (Action(Op.REDUCE), Action(Op.CLIP), Action(Op.UPDATE)) if tail else ()
    if not num_microbatches:
        return (ending,) * num_ranks
    return tuple((*actions_of_rank(grid, rank), *ending) for rank in range(num_ranks))


def _check_schedule(schedule: str, virtual: int) -> None:
    if schedule not in SCHEDULES:
        raise LayoutError(f'schedule="{schedule}" does not exist; use one of {", ".join(SCHEDULES)}.')
    if schedule == "interleaved" and virtual < 2:
        raise LayoutError(
            f"schedule=interleaved needs at least 2 stages a rank, but virtual={virtual}; "
            "use virtual=2 or more, or schedule=1f1b."
        )
    if schedule == "1f1b" and virtual > 1:
        raise LayoutError(
            f"schedule=1f1b has one stage a rank, but virtual={virtual}; "
            "use schedule=interleaved, or virtual=1."
        )
    if schedule == "zero-bubble" and virtual > 1:
        raise LayoutError(
            f"schedule=zero-bubble has one stage a rank, but virtual={virtual}; "
            "use virtual=1, or schedule=interleaved."
        )


def _check_sizes(num_ranks: int, num_microbatches: int, virtual: int) -> None:
    if num_ranks < 1:
        raise LayoutError(f"pp={num_ranks}, but a pipeline has at least one rank; use pp=1 or more.")
    if virtual < 1:
        raise LayoutError(f"virtual={virtual}, but a rank holds at least one stage; use virtual=1 or more.")
    if num_microbatches < 0:
        raise LayoutError(f"{num_microbatches} microbatches asked for; use 0 (an idle replica) or more.")


def _checked_segments(segments: Sequence[int], num_stages: int) -> tuple[int, ...]:
    counts = tuple(segments) or (1,) * num_stages
    if len(counts) != num_stages:
        raise LayoutError(
            f"segments are given for {len(counts)} stages, but the pipeline has {num_stages} "
            "(pp * virtual); give one count for each stage, or none."
        )
    if min(counts) < 1:
        raise LayoutError(
            f"segments={list(counts)}, but every stage has at least one; use counts of 1 or more."
        )
    return counts


def _forward(grid: _Grid, stage: int, microbatch: int, segment: int = 0) -> Iterator[Action]:
    """Run one cell forward, with the receive that must come before it and the send after it."""
    remote = grid.num_ranks > 1  # else all stages are on one rank, and the hand-over is local
    if remote and stage > 0 and segment == 0:
        yield Action(Op.RECEIVE_ACTIVATION, stage, microbatch)
    yield Action(Op.FORWARD, stage, microbatch, segment)
    if remote and stage < grid.last_stage and segment == grid.segments[stage] - 1:
        yield Action(Op.SEND_ACTIVATION, stage, microbatch)


def _backward(
    grid: _Grid, stage: int, microbatch: int, segment: int = 0, op: Op = Op.BACKWARD
) -> Iterator[Action]:
    """Run one cell backward, with the receive that must come before it and the send after it."""
    remote = grid.num_ranks > 1
    if remote and stage < grid.last_stage and segment == grid.segments[stage] - 1:
        yield Action(Op.RECEIVE_GRADIENT, stage, microbatch)
    yield Action(op, stage, microbatch, segment)
    if remote and stage > 0 and segment == 0:
        yield Action(Op.SEND_GRADIENT, stage, microbatch)


def _gpipe(grid: _Grid, rank: int) -> Iterator[Action]:
    """Run all forwards, then all backwards; with coupled rows, a barrier between segments."""
    for stage in grid.stages(rank):
        yield from _stage_forward(grid, stage)
    for stage in reversed(grid.stages(rank)):
        yield from _stage_backward(grid, stage)


def _stage_forward(grid: _Grid, stage: int) -> Iterator[Action]:
    couples_loss = grid.couple_loss and stage == grid.last_stage
    last_segment = grid.segments[stage] - 1
    for segment in range(last_segment + 1):
        for microbatch in range(grid.num_microbatches):
            yield from _forward(grid, stage, microbatch, segment)
        if segment < last_segment or couples_loss:
            yield Action(Op.COUPLE_FORWARD, stage, segment=segment)


def _stage_backward(grid: _Grid, stage: int) -> Iterator[Action]:
    couples_loss = grid.couple_loss and stage == grid.last_stage
    last_segment = grid.segments[stage] - 1
    for segment in reversed(range(last_segment + 1)):
        if segment < last_segment or couples_loss:
            yield Action(Op.COUPLE_BACKWARD, stage, segment=segment)
        for microbatch in range(grid.num_microbatches):
            yield from _backward(grid, stage, microbatch, segment)


def _one_forward_one_backward(grid: _Grid, rank: int) -> Iterator[Action]:
    """Start each backward as soon as it can run, so that few activations are alive."""
    cells = [(rank, microbatch) for microbatch in range(grid.num_microbatches)]
    num_warm = grid.num_ranks - rank - 1
    yield from _alternate(grid, cells, cells, num_warm)


def _interleaved(grid: _Grid, rank: int) -> Iterator[Action]:
    """Run 1f1b over several stages a rank, in groups of p microbatches, for any number of microbatches.

    Groups are whole in the order that is built: columns past the last microbatch are made up and then
    left out. Leaving a column out of an order that works leaves an order that works.
    """
    size = grid.num_ranks
    stages = grid.stages(rank)
    groups = [range(first, first + size) for first in range(0, grid.num_microbatches, size)]
    forwards = [(stage, m) for group in groups for stage in stages for m in group]
    backwards = [(stage, m) for group in groups for stage in reversed(stages) for m in group]
    num_warm = 2 * (size - rank - 1) + (grid.virtual - 1) * size
    yield from _alternate(grid, forwards, backwards, num_warm)


def _alternate(grid: _Grid, forwards: list[Cell], backwards: list[Cell], num_warm: int) -> Iterator[Action]:
    """Run ``num_warm`` forwards, then one forward and one backward in turn, then what is left."""
    for index in range(-num_warm, len(backwards)):
        ahead = index + num_warm
        if ahead < len(forwards):
            yield from _real(grid, _forward, forwards[ahead])
        if index >= 0:
            yield from _real(grid, _backward, backwards[index])


def _real(grid: _Grid, run: Callable[[_Grid, int, int], Iterator[Action]], cell: Cell) -> Iterator[Action]:
    stage, microbatch = cell
    if microbatch < grid.num_microbatches:
        yield from run(grid, stage, microbatch)


def _zero_bubble(grid: _Grid, rank: int) -> Iterator[Action]:
    """Run 1f1b, but hand the input gradient on first and put weight gradients where rank would idle.

    Rank r runs each weight gradient right after its input gradient, but puts off those of r pairs of
    forward and backward before its last pair: from there on the ranks before it are out of forwards and
    wait for gradients. At most p microbatches are alive on any rank.
    The first stage has nobody to hand a gradient to, so it never splits its backward.
    """
    if rank == 0:
        yield from _one_forward_one_backward(grid, rank)
        return
    num_microbatches = grid.num_microbatches
    num_warm = min(grid.num_ranks - rank - 1, num_microbatches)
    num_pairs = num_microbatches - num_warm
    weights = (Action(Op.BACKWARD_WEIGHT, rank, microbatch) for microbatch in range(num_microbatches))
    for microbatch in range(num_warm):
        yield from _forward(grid, rank, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch < num_pairs:
            yield from _forward(grid, rank, num_warm + microbatch)
        yield from _backward(grid, rank, microbatch, op=Op.BACKWARD_INPUT)
        if not num_pairs - 1 - rank <= microbatch < num_pairs - 1:
            yield next(weights)
    yield from weights


_BUILDERS: dict[str, Callable[[_Grid, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}
