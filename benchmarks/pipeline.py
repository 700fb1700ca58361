"""Two pipeline stages beside torch.distributed.pipelining, and how much of a step ranks really idle."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwise.schedule.actions import Op
from meshwise.schedule.library import build_program
from meshwise.schedule.replay import Costs, replay

from .cases import CASES
from .contender import Contender, meshwise
from .measure import Effort, Result, Row
from .turns import compete

# Our layouts, and the schedules of torch's that do the same.
STOCK = {
    "gpipe": ("ScheduleGPipe",),
    "1f1b": ("Schedule1F1B",),
    "interleaved": ("ScheduleInterleaved1F1B",),
    "gpipe,virtual=2": ("ScheduleLoopedBFS",),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
}
LOOPED = ("interleaved", "gpipe,virtual=2")
CUT_IN_FOUR = (*LOOPED, "zero-bubble")
COUNTS = (2, 4, 8)
MOST_BLOCKS = 5  # there are many comparisons
TARGET, BUBBLE_POINTS = 0.95, 5.0


def pipelines(
    names: Sequence[str], effort: Effort, schedules: Sequence[str] = tuple(STOCK), counts: Sequence[int] = COUNTS
) -> Iterator[Row]:
    """Compare every schedule on two ranks with torch's, the same cuts and microbatches."""
    effort = replace(effort, blocks=min(effort.blocks, MOST_BLOCKS))
    for name in names:
        for schedule in schedules:
            if schedule not in CUT_IN_FOUR or 4 in CASES[name].cuts:
                yield from _schedule(name, schedule, counts, effort)


def _schedule(name: str, schedule: str, counts: Sequence[int], effort: Effort) -> Iterator[Row]:
    """Compare one schedule: all numbers of microbatches of a side in the same processes, torch's kinds apart."""
    case = CASES[name]
    contenders: list[Contender] = []
    pairs: list[tuple[int, str, str]] = []
    for count in counts:
        batch = case.microbatch * count
        mine = meshwise(
            f"pp=2, {schedule}, m={count}",
            name,
            f"pp=2,schedule={schedule}",
            ranks=2,
            batch=batch,
            microbatch=case.microbatch,
            cuts=case.cuts[4 if schedule in LOOPED else 2],
        )
        contenders.append(replace(mine, options={**mine.options, "tell": True}))
        for kind in STOCK[schedule]:
            options = {"schedule": kind, "microbatches": count, "batch": batch}
            title = f"{kind}, m={count}"
            contenders.append(Contender(name=title, kind="stock", case=name, home=kind, options=options))
            pairs.append((count, mine.name, title))
    found = compete(contenders, effort)
    yield from (Row.ratio("pipeline", name, found, mine, other, TARGET) for _, mine, other in pairs)
    for count, mine in dict.fromkeys((count, mine) for count, mine, _ in pairs):
        yield _bubble_row(name, schedule, count, found[mine], mine)


# ---- bubbles -----------------------------------------------------------------------------------


def _bubble_row(case: str, schedule: str, count: int, result: Result, name: str) -> Row:
    """Compare the idle share of both ranks' time with the replay of the program at the measured costs."""
    row = Row(part="bubble", case=case, name=name, value=None, unit="points", target=BUBBLE_POINTS, note=result.note)
    if result.told is None:
        return row
    kind, _, _ = schedule.partition(",")
    virtual = 2 if schedule in LOOPED else 1
    program = build_program(kind, num_ranks=2, num_microbatches=count, virtual=virtual, tail=False)
    measured = _idle(result.told)
    replayed = replay(program, costs=_costs(result.told, 2 * virtual)).bubble
    theory = replay(program, costs=Costs(forward=1.0, backward=2.0)).bubble
    note = f"measured {measured:.1%}, replayed {replayed:.1%}, stages all equal {theory:.1%}"
    return replace(row, value=abs(measured - replayed) * 100, note=note)


def _idle(ranks: list[Any]) -> float:
    """Give the share of time, from the step's first cell to its last, in which a rank runs no cell: of the median."""
    found = []
    for step in zip(*ranks, strict=True):
        start = min(span[2] for spans in step for span in spans)
        end = max(span[3] for spans in step for span in spans)
        busy = sum(span[3] - span[2] for spans in step for span in spans)
        found.append(1 - busy / (len(step) * (end - start)))
    return statistics.median(found)


def _costs(ranks: list[Any], num_stages: int) -> Costs:
    """Give the median seconds of each kind of cell of each stage, adding up gradients counted to the backwards."""
    spans = [span for steps in ranks for step in steps for span in step]

    def median(op: Op) -> list[float]:
        by_stage = [[s[3] - s[2] for s in spans if s[:2] == (op.value, n)] for n in range(num_stages)]
        return [statistics.median(values) if values else 0.0 for values in by_stage]

    adding = []
    for steps in ranks:
        mine = [span for step in steps for span in step]
        backwards = sum(s[0] in (Op.BACKWARD.value, Op.BACKWARD_WEIGHT.value) for s in mine)
        adding.append(sum(s[3] - s[2] for s in mine if s[0] == "add") / max(1, backwards))

    def with_adding(values: list[float]) -> list[float]:
        return [value + adding[stage % len(ranks)] for stage, value in enumerate(values)]

    return Costs(
        forward=median(Op.FORWARD),
        backward=with_adding(median(Op.BACKWARD)),
        backward_input=median(Op.BACKWARD_INPUT),
        backward_weight=with_adding(median(Op.BACKWARD_WEIGHT)),
    )
