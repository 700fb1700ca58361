"""The time of a step: the program is replayed with the stages' costs; what comes after it is added term by term."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..layout import Layout
from ..schedule.actions import CELLS, RECEIVES, Op, Program
from ..schedule.library import build_program
from ..schedule.replay import Costs, Timeline, replay
from .stage import StageCost

LONGEST_PROGRAM = 5_000  # actions that are replayed one by one; beyond, a steady state is gone on with


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Hold a replayed pipeline: its end, and of the rank that computes most: its cells, and waiting for messages.

    ``timeline`` is of the part that was replayed.
    """

    seconds: float
    busy: tuple[float, ...]  # of each rank
    bubble: float  # of the busiest rank, messages left out
    messages: float  # what messages add
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Say what handing values on costs at each boundary: ``link`` until they arrive, ``send`` of the sender's time.

    ``receive``: of the receiver's time, for each message.
    """

    link: tuple[float, ...] = ()
    send: tuple[float, ...] = ()
    receive: float = 0.0


def replay_stages(
    stages: Sequence[StageCost],
    layout: Layout,
    num_microbatches: int,
    transfer: Transfer,
    *,
    slow: Sequence[float] = (),
    load: float = 0.0,
    coupled: bool = False,
    couple_loss: bool = False,
    couple: float = 0.0,
) -> Replayed:
    """Replay one replica's pipeline. ``slow`` multiplies ranks' cells; ``load`` is added where the batch is read."""
    segments = tuple(s.num_rows + 1 for s in stages) if coupled else ()
    costs = _costs(stages, layout, transfer, slow, load, couple)
    silent = _costs(stages, layout, replace(transfer, link=()), slow, load, couple)
    build = functools.partial(_program, layout, segments, couple_loss)
    whole, timeline, busy = _run(build, costs, num_microbatches, layout.pp)
    quiet = _run(build, silent, num_microbatches, layout.pp)[0] if any(transfer.link) else whole
    top = max(busy)
    return Replayed(
        seconds=whole,
        busy=tuple(busy),
        bubble=max(0.0, quiet - top),
        messages=max(0.0, whole - quiet),
        timeline=timeline,
    )


@functools.lru_cache(maxsize=512)
def _program(layout: Layout, segments: tuple[int, ...], couple_loss: bool, num_microbatches: int) -> Program:
    return build_program(
        layout.schedule,
        num_ranks=layout.pp,
        num_microbatches=num_microbatches,
        virtual=layout.virtual,
        segments=segments,
        couple_loss=couple_loss,
        tail=False,
    )


def _costs(
    stages: Sequence[StageCost], layout: Layout, transfer: Transfer, slow: Sequence[float], load: float, couple: float
) -> Costs:
    """Give the replay's costs: recompute runs each forward again, a sender hands over in its own time."""
    count, last = len(stages), len(stages) - 1
    factor = [slow[s % layout.pp] if slow else 1.0 for s in range(count)]
    send = [*transfer.send, 0.0] if transfer.send else [0.0] * count
    reads = [load * ((s == 0) + (s == last)) / (1 if last else 2) for s in range(count)]
    takes = [transfer.receive * (k > 0) for k in range(count)]
    forward = [(s.seconds.forward + s.tensor_forward) * f for s, f in zip(stages, factor, strict=True)]
    again = forward if layout.recompute else [0.0] * count
    whole = [(s.seconds.backward + s.tensor_backward) * f for s, f in zip(stages, factor, strict=True)]
    weight = [s.seconds.backward_weight * f for s, f in zip(stages, factor, strict=True)]
    back = [(send[k - 1] if k else 0.0) + transfer.receive * (k < last) for k in range(count)]
    return Costs(
        forward=[sum(parts) for parts in zip(forward, send, reads, takes, strict=True)],
        backward=[a + b + c for a, b, c in zip(whole, again, back, strict=True)],
        backward_input=[a + b + c - w for a, b, c, w in zip(whole, again, back, weight, strict=True)],
        backward_weight=weight,
        transfer=list(transfer.link) or 0.0,
        couple=couple,
    )


def _run(
    build: functools.partial[Program], costs: Costs, num_microbatches: int, pp: int
) -> tuple[float, Timeline, list[float]]:
    """Replay; of a very long program only the beginning and the end, going on in between as it does by then."""
    each = sum(map(len, build(num_microbatches=2 * pp))) / (2 * pp)
    fits = max(6 * pp, int(LONGEST_PROGRAM / each / pp) * pp)
    if num_microbatches <= fits:
        timeline = replay(build(num_microbatches=num_microbatches), costs=costs)
        return timeline.seconds, timeline, _busy(timeline)
    short = fits - pp + (num_microbatches - fits) % pp
    early = replay(build(num_microbatches=short), costs=costs)
    late = replay(build(num_microbatches=short + pp), costs=costs)
    rounds = (num_microbatches - short) / pp
    seconds = early.seconds + rounds * (late.seconds - early.seconds)
    return seconds, late, [a + rounds * (b - a) for a, b in zip(_busy(early), _busy(late), strict=True)]


def _busy(timeline: Timeline) -> list[float]:
    """Add up what each rank computes."""
    busy = [0.0] * len(timeline.peak_live)
    for span in timeline.spans:
        if span.action.op in CELLS or span.action.op in (Op.COUPLE_FORWARD, Op.COUPLE_BACKWARD):
            busy[span.rank] += span.end - span.start
        else:
            assert span.action.op in RECEIVES or span.end == span.start
    return busy
