"""The same training as a meshwise job, and what its ranks know about where the time of a step went."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import TensorDataset

import meshwise as mw
from meshwise.schedule.actions import CELLS
from meshwise.session import Session

from .cases import CASES, loss
from .contender import Contender
from .loops import optimizer_for

EPOCHS = 1 << 30  # never the end
TOLD_STEPS = 5

Span = tuple[str, int, float, float]  # kind of cell ("F", "B", .., or "add"), stage, start, end


class Ours:
    """Hold a session that trains a case under a layout. Every rank makes one."""

    def __init__(self, contender: Contender) -> None:
        case, options = CASES[contender.case], contender.options
        job = mw.Job(
            model=case.build,
            loss=loss,
            optimizer=optimizer_for,
            train_data=TensorDataset(*case.make_data()),
            batch_size=options["batch"],
            microbatch_size=options["microbatch"],
            batch_norm="microbatch",
            cuts=tuple(map(str, options["cuts"])),
            epochs=EPOCHS,
            drop_last=True,
        )
        self.session = Session(job, options["layout"], threads=contender.threads if contender.ranks == 1 else None)
        self.batches = self.session.batches()

    def run(self, steps: int) -> None:
        """Run this many optimizer steps and read the loss of each."""
        for _ in range(steps):
            _ = self.session.step(next(self.batches)).loss

    def tell(self) -> list[list[Span]]:
        """Run some steps and give the cells of each, on a clock that all processes of a host share."""
        spans: list[Span] = []
        _watch(self.session.worker.engine, spans)
        steps = []
        for _ in range(TOLD_STEPS):
            self.run(1)
            steps.append(list(spans))
            spans.clear()
        return steps


def _watch(engine: Any, spans: list[Span]) -> None:
    """Note each cell that an engine runs from now on, and each time that it adds up gradients."""
    plain_run, plain_settle = engine._run, engine.gradients.settle

    def run(action: Any) -> Any:
        start = time.perf_counter()
        result = yield from plain_run(action)
        if action.op in CELLS:
            spans.append((action.op.value, action.stage, start, time.perf_counter()))
        return result

    def settle() -> None:
        start = time.perf_counter()
        plain_settle()
        spans.append(("add", -1, start, time.perf_counter()))

    engine._run, engine.gradients.settle = run, settle
