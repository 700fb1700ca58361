"""The loops that a person writes by hand with torch alone: one device, DDP, ZeroRedundancyOptimizer, fully_shard.

All take a batch by indexing tensors in memory, run the same SGD with momentum, set gradients to None, and read the
loss each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .cases import CASES, Data, loss
from .contender import Contender

LEARNING_RATE, MOMENTUM = 1e-3, 0.9


def optimizer_for(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Build the optimizer of all contenders."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, **options)


def feed(contender: Contender) -> Iterator[Data]:
    """Give shuffled batches for ever by indexing the tensors; rank r takes the r-th part of each."""
    x, y = CASES[contender.case].make_data()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batch = contender.options["batch"] // ranks
    for whole in shuffled(len(x), batch * ranks):
        ids = whole[rank * batch : (rank + 1) * batch]
        yield x[ids], y[ids]


def shuffled(count: int, batch: int) -> Iterator[Tensor]:
    """Give the ids of whole batches for ever, in a new order each epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % batch].split(batch)


def build(contender: Contender) -> nn.Module:
    """Build the case's model, the same on every rank."""
    torch.manual_seed(0)
    return CASES[contender.case].build().train()


class Loop:
    """Train a model on the batches of this rank. ``backward`` and ``update`` are a peer's own, where it has them."""

    def __init__(
        self,
        contender: Contender,
        model: Callable[[Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        backward: Callable[[Tensor], Any] = torch.Tensor.backward,
    ) -> None:
        self.model, self.optimizer, self.backward = model, optimizer, backward
        self.batches = feed(contender)

    def run(self, steps: int) -> None:
        """Run this many optimizer steps."""
        for _ in range(steps):
            x, y = next(self.batches)
            value = loss(self.model(x), y)
            self.backward(value)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            value.item()


def plain(contender: Contender) -> Loop:
    """Train on one device with as many threads as the contender says."""
    model = build(contender)
    return Loop(contender, model, optimizer_for(model.parameters()))


def ddp(contender: Contender) -> Loop:
    """Train with DDP and the options given to it; ``fused`` takes torch's fused SGD."""
    model = DistributedDataParallel(build(contender), process_group=dist.new_group(), **contender.options["ddp"])
    return Loop(contender, model, optimizer_for(model.parameters(), **contender.options.get("optimizer", {})))


def zero_redundancy(contender: Contender) -> Loop:
    """Train with DDP at its best settings and its optimizer's state sharded, parameters as views of its buckets."""
    model = DistributedDataParallel(build(contender), **contender.options["ddp"])
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=LEARNING_RATE, momentum=MOMENTUM
    )
    return Loop(contender, model, optimizer)


def sharded(contender: Contender) -> Loop:
    """Train with fully_shard: each of the model's outer layers that has parameters, then the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(contender)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = partial(fully_shard, mesh=mesh)
    for child in model.children():
        if next(child.parameters(), None) is not None:
            shard(child)
    shard(model)
    return Loop(contender, model, optimizer_for(model.parameters()))
