"""The alternatives: the loops that a person writes by hand for one device, DDP and torch's pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from .measure import Run
from .models import Case, Data, loss

LEARNING_RATE = 1e-3


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    """Build the optimizer of both sides."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def feed(data: Data, batch: int, rank: int = 0, ranks: int = 1) -> Iterator[Data]:
    """Give shuffled batches for ever by indexing the tensors; rank r takes the r-th part of each."""
    x, y = data
    for whole in shuffled(len(x), batch * ranks):
        ids = whole[rank * batch : (rank + 1) * batch]
        yield x[ids], y[ids]


def shuffled(count: int, batch: int) -> Iterator[Tensor]:
    """Give the ids of whole batches for ever, in a new order each epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % batch].split(batch)


def plain_loop(case: Case, data: Data) -> Run:
    """Train on one device."""
    torch.manual_seed(0)
    model = case.build()
    return _loop(model, feed(data, case.batch))


def ddp_loop(case: Case, data: Data) -> Run:
    """Train with DDP, gradients as views of its buckets, the graph declared static."""
    torch.manual_seed(0)
    group = dist.new_group()
    model = DistributedDataParallel(case.build(), process_group=group, gradient_as_bucket_view=True, static_graph=True)
    return _loop(model, feed(data, case.batch, dist.get_rank(), dist.get_world_size()))


def _loop(model: nn.Module, batches: Iterator[Data]) -> Run:
    optimizer = optimizer_for(model.parameters())
    model.train()

    def run(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            value.item()

    return run


# ---- pipelines ---------------------------------------------------------------------------------

STOCK = {
    "gpipe": (ScheduleGPipe,),
    "1f1b": (Schedule1F1B,),
    "interleaved": (ScheduleInterleaved1F1B,),
    "zero-bubble": (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble),
}
LOOPED = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)


class StockPipeline:
    """Train with torch.distributed.pipelining on two ranks, its stages cut where the case says."""

    def __init__(self, case: Case, data: Data, kind: Callable[..., Any], microbatches: int) -> None:
        torch.manual_seed(0)
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        virtual = 2 if kind in (*LOOPED, ScheduleZBVZeroBubble) else 1
        count = ranks * virtual
        mine = [self.rank + ranks * v for v in range(virtual)]
        if kind is ScheduleZBVZeroBubble:
            mine = [self.rank, count - 1 - self.rank]
        parts = case.stages(case.build(), count)
        group = dist.new_group()
        device = torch.device("cpu")
        self.stages = [PipelineStage(parts[s], s, count, device, group=group) for s in mine]
        given = self.stages if virtual > 1 else self.stages[0]
        self.schedule = kind(given, microbatches, loss_fn=loss)
        self.first, self.last = 0 in mine, count - 1 in mine
        self.optimizer = optimizer_for([p for s in mine for p in parts[s].parameters()])
        self.data, self.ids = data, shuffled(len(data[0]), case.microbatch * microbatches)

    def run(self, steps: int) -> None:
        """Run this many optimizer steps."""
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
