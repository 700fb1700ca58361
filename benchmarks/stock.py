"""torch.distributed.pipelining on two ranks, as its tutorial uses it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from .cases import CASES, loss
from .contender import Contender
from .loops import build, optimizer_for, shuffled

LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class StockPipeline:
    """Train under a schedule of torch's, its stages cut where the case says, two stages a rank where it wants them."""

    def __init__(self, contender: Contender) -> None:
        case, kind = CASES[contender.case], contender.options["schedule"]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        virtual = 2 if kind in (*LOOPED, *V_SHAPED) else 1
        count = ranks * virtual
        mine = [rank, count - 1 - rank] if kind in V_SHAPED else [rank + ranks * v for v in range(virtual)]
        parts = case.stages(build(contender), count)
        group, device = dist.new_group(), torch.device("cpu")
        stages = [PipelineStage(parts[s], s, count, device, group=group) for s in mine]
        given = stages if virtual > 1 else stages[0]
        self.schedule = _schedule(kind)(given, contender.options["microbatches"], loss_fn=loss)
        self.first, self.last = 0 in mine, count - 1 in mine
        self.optimizer = optimizer_for([p for s in mine for p in parts[s].parameters()])
        self.data = case.make_data()
        self.ids = shuffled(len(self.data[0]), contender.options["batch"])

    def run(self, steps: int) -> None:
        """Run this many optimizer steps; the rank of the last stage reads the loss."""
        for _ in range(steps):
            ids = next(self.ids)
            losses: list[Tensor] = []
            given = (self.data[0][ids],) if self.first else ()
            if self.last:
                self.schedule.step(*given, target=self.data[1][ids], losses=losses)
            else:
                self.schedule.step(*given)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if losses:
                torch.stack(losses).mean().item()


def _schedule(name: str) -> type:
    """Find a schedule; not all are offered at the top of the package."""
    found = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
    return found  # type: ignore[no-any-return]
