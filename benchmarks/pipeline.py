"""Two pipeline stages against torch.distributed.pipelining, and how much of a step ranks really idle."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from meshwise.launch.local import run_ranks
from meshwise.schedule.actions import CELLS, Op
from meshwise.schedule.library import build_program
from meshwise.schedule.replay import Costs, replay

from .measure import Effort, Row, interleave
from .models import CASES, Case, Data
from .ours import Ours
from .peers import STOCK, StockPipeline
from .replicas import make_data

MICROBATCHES = 8
BUBBLE_STEPS = 5

Span = tuple[str, int, float, float]  # kind of cell ("F", "B", ..), stage, start, end


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Hold the idle share of both ranks' time: measured (median of some steps), replayed, in theory."""

    case: str
    schedule: str
    meshwise: float
    stock: float
    replayed: float  # with meshwise's measured seconds of each cell, messages taking no time
    theory: float  # all stages equal, a backward twice a forward

    @property
    def key(self) -> str:
        """Name the measurement."""
        return f"bubble/{self.case}/{self.schedule}"

    def as_dict(self) -> dict[str, object]:
        """Give the bubble as plain values."""
        return {"key": self.key, **vars(self)}

    def __str__(self) -> str:
        return (
            f"{'bubble':11} {f'{self.case}: {self.schedule}':34} meshwise {self.meshwise:6.1%}  "
            f"stock {self.stock:6.1%}  replayed {self.replayed:6.1%}  theory {self.theory:6.1%}"
        )


def pipelines(names: list[str], schedules: list[str], effort: Effort) -> tuple[list[Row], list[Bubble]]:
    """Compare every schedule on two ranks with the stock one, the same cut and 8 microbatches."""
    rows: list[Row] = []
    bubbles: list[Bubble] = []
    for name in names:
        for schedule in schedules:
            if schedule in ("interleaved", "zero-bubble") and 4 not in CASES[name].cuts:
                continue
            found = run_ranks(partial(_pipeline, name, schedule, effort), 2, timeout=1800)
            rows += _rows(name, schedule, found[0][0])
            bubbles.append(_bubble(name, schedule, [f[1] for f in found], [f[2] for f in found]))
    return rows, bubbles


def _rows(name: str, schedule: str, seconds: dict[str, tuple[float, ...]]) -> list[Row]:
    return [
        Row(
            part="pipeline",
            case=name,
            meshwise=f"pp=2,{schedule}",
            alternative=other,
            seconds=seconds["meshwise"],
            alternative_seconds=seconds[other],
            target=1.00,
        )
        for other in seconds
        if other != "meshwise"
    ]


def _pipeline(name: str, schedule: str, effort: Effort, context: Any) -> Any:
    case = CASES[name]
    data = make_data(case)
    mine = _ours(case, data, schedule)
    peers = {k.__name__: StockPipeline(case, data, k, MICROBATCHES) for k in STOCK[schedule]}
    seconds = interleave({"meshwise": mine.run, **{n: p.run for n, p in peers.items()}}, effort)
    gc.collect()
    spans = _record(mine.run, lambda spans: _watch_ours(mine, spans))
    stock = next(iter(peers.values()))
    return seconds, spans, _record(stock.run, lambda spans: _watch_stock(stock, spans))


def _ours(case: Case, data: Data, schedule: str) -> Ours:
    virtual = 2 if schedule == "interleaved" else 1
    return Ours(
        case,
        data,
        f"pp=2,schedule={schedule}",
        batch=case.microbatch * MICROBATCHES,
        microbatch=case.microbatch,
        cuts=case.cuts[2 * virtual],
    )


# ---- bubbles -----------------------------------------------------------------------------------


def _record(run: Callable[[int], None], watch: Callable[[list[Span]], None]) -> list[list[Span]]:
    """Run some steps and give the cells of each, on a clock that all processes of a host share."""
    spans: list[Span] = []
    watch(spans)
    steps = []
    for _ in range(BUBBLE_STEPS):
        dist.barrier()
        run(1)
        steps.append(list(spans))
        spans.clear()
    return steps


def _watch_ours(mine: Ours, spans: list[Span]) -> None:
    engine: Any = mine.session.worker.engine
    plain = engine._run

    def run(action: Any) -> Any:
        start = time.perf_counter()
        result = yield from plain(action)
        if action.op in CELLS:
            spans.append((action.op.value, action.stage, start, time.perf_counter()))
        return result

    engine._run = run
    settle = engine.gradients.settle

    def timed_settle() -> None:
        start = time.perf_counter()
        settle()
        spans.append(("add", -1, start, time.perf_counter()))

    engine.gradients.settle = timed_settle


def _watch_stock(peer: StockPipeline, spans: list[Span]) -> None:
    def timed(kind: str, stage: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spans.append((kind, stage, start, time.perf_counter()))
            return result

        return call

    for stage in peer.stages:
        for kind, name in (
            ("F", "forward_one_chunk"),
            ("B", "backward_one_chunk"),
            ("W", "backward_weight_one_chunk"),
        ):
            setattr(stage, name, timed(kind, stage.stage_index, getattr(stage, name)))
    schedule: Any = peer.schedule
    schedule._maybe_compute_loss = timed("loss", -1, schedule._maybe_compute_loss)


def _bubble(name: str, schedule: str, ours: list[Any], stock: list[Any]) -> Bubble:
    virtual = 2 if schedule == "interleaved" else 1
    program = build_program(schedule, num_ranks=2, num_microbatches=MICROBATCHES, virtual=virtual, tail=False)
    return Bubble(
        case=name,
        schedule=schedule,
        meshwise=_idle(ours),
        stock=_idle(stock),
        replayed=replay(program, costs=_costs(ours, 2 * virtual)).bubble,
        theory=replay(program, costs=Costs(forward=1.0, backward=2.0)).bubble,
    )


def _idle(ranks: list[list[list[Span]]]) -> float:
    """Give the share of time, from the step's first cell to its last, in which a rank runs no cell."""
    found = []
    for step in zip(*ranks, strict=True):
        start = min(span[2] for spans in step for span in spans)
        end = max(span[3] for spans in step for span in spans)
        busy = sum(span[3] - span[2] for spans in step for span in spans)
        found.append(1 - busy / (len(step) * (end - start)))
    return statistics.median(found)


def _costs(ranks: list[list[list[Span]]], num_stages: int) -> Costs:
    spans = [span for steps in ranks for step in steps for span in step]

    def median(op: Op) -> list[float]:
        by_stage = [[s[3] - s[2] for s in spans if s[:2] == (op.value, n)] for n in range(num_stages)]
        return [statistics.median(values) if values else 0.0 for values in by_stage]

    return Costs(
        forward=median(Op.FORWARD),
        backward=median(Op.BACKWARD),
        backward_input=median(Op.BACKWARD_INPUT),
        backward_weight=median(Op.BACKWARD_WEIGHT),
    )
