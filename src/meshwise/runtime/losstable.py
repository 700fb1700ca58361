"""The losses of a step: weights of microbatches, values told to all ranks."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import NonFiniteError
from ..parallel.transport import wait_for
from .step import mixed_step

if TYPE_CHECKING:
    from .engine import Engine

Steps = Generator[None, None, Any]


class LossTable:
    """Hold the losses and measures of the step's microbatches; reset by :meth:`begin` at each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.values: dict[int, Tensor] = {}
        self.gathered: Any = None
        self.weights: dict[int, float] = {}
        self.measures: dict[int, float] = {}

    def begin(self) -> None:
        """Weigh the microbatches of this replica: samples, or what counts, as shares of what the step usually has."""
        engine = self.engine
        weigher, total = engine.weigher, engine.batch.num_samples
        self.values, self.gathered, self.weights, self.measures = {}, None, {}, {}
        if engine.my_stages[-1] != engine.layout.num_stages - 1:
            self.measures = dict.fromkeys(engine.local, 0.0)  # the last stage weighs, and tells
            return
        for m in engine.local:
            share = engine.batch.sizes[m] / total
            if weigher.kind in ("sum", "batch"):
                self.measures[m], self.weights[m] = share, 1.0
            elif weigher.needs_data:
                self.measures[m] = weigher.measure(engine.batch.microbatch(m))
                self.weights[m] = self.measures[m] / (weigher.per_sample * total)
            else:
                self.measures[m] = self.weights[m] = share

    def post(self) -> None:
        """Send this rank's microbatch losses on their way to all ranks, while gradients are on theirs."""
        if len(self.engine.world) == 1:
            return
        engine, height = self.engine, max(1, *self.engine.share.counts)
        told = [engine.gradients.mark]
        for m in engine.local:  # losses are on the ranks that hold the last stage
            told += (float(self.values[m]) if m in self.values else 0.0, self.measures[m])
        told += [0.0] * (1 + 2 * height - len(told))
        self.gathered = engine.transport.tell(told, engine.world)

    def gather(self) -> Steps:
        """Give (losses, measures) of all microbatches of the step, in order."""
        engine = self.engine
        if len(engine.world) == 1:
            return [float(self.values[m]) for m in engine.local], list(self.measures.values())
        rows = yield from wait_for(self.gathered)
        if any(rows[rank][0] != engine.gradients.mark for rank in engine.dp_group):
            raise mixed_step(engine.step_index)
        losses: list[float] = []
        measures: list[float] = []
        pp_index = (engine.layout.num_stages - 1) % engine.layout.pp
        for dp, count in enumerate(engine.share.counts):
            row = rows[engine.mesh.rank(dp=dp, pp=pp_index)]
            losses += row[1 : 1 + 2 * count : 2]
            measures += row[2 : 2 + 2 * count : 2]
        return losses, measures

    def check(self, losses: Sequence[float]) -> bool:
        """Tell whether all losses are finite; raise when the job says to stop."""
        bad = [m for m, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return True
        if self.engine.job.on_nonfinite == "skip":
            return False
        m = min(bad[0], len(self.engine.batch.sizes) - 1)
        dp = next(i for i, (a, b) in enumerate(self.engine.share.microbatches) if a <= m < b)
        rank = self.engine.mesh.rank(dp=dp, pp=(self.engine.layout.num_stages - 1) % self.engine.layout.pp)
        ids = self.engine.batch.ids_of(m)
        raise NonFiniteError(
            f"step {self.engine.step_index}: the loss of microbatch {m} on rank {rank} is {losses[bad[0]]}"
            f"{f' (samples {list(ids)})' if ids else ''}; nothing was updated. "
            'Look at those samples, lower the learning rate, or use Job(on_nonfinite="skip").'
        )
