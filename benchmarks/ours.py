"""The same training as a meshwise job."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import TensorDataset

import meshwise as mw
from meshwise.session import Session

from .measure import Run
from .models import Case, Data, loss
from .peers import optimizer_for

EPOCHS = 1 << 30  # never the end


class Ours:
    """Hold a session that trains a case under a layout. Every rank makes one."""

    def __init__(
        self,
        case: Case,
        data: Data,
        layout: str,
        *,
        batch: int,
        microbatch: int,
        cuts: Sequence[int] = (),
    ) -> None:
        job = mw.Job(
            model=case.build,
            loss=loss,
            optimizer=optimizer_for,
            train_data=TensorDataset(*data),
            batch_size=batch,
            microbatch_size=microbatch,
            batch_norm="microbatch",
            cuts=tuple(map(str, cuts)),
            epochs=EPOCHS,
            drop_last=True,
        )
        self.session = Session(job, layout)
        self.batches = self.session.batches()

    def run(self, steps: int) -> None:
        """Run this many optimizer steps."""
        for _ in range(steps):
            self.session.step(next(self.batches))


def ours(case: Case, data: Data, layout: str, *, batch: int, microbatch: int) -> Run:
    """Give the run function of a new session."""
    return Ours(case, data, layout, batch=batch, microbatch=microbatch).run
