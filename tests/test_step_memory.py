"""What a step leaves behind: nothing that waits for the garbage collector, no data, no activations."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from meshwise.job import Job
from meshwise.layout import Layout
from meshwise.parallel.transport import Mailroom, MemoryTransport
from meshwise.runtime.worker import Worker, drive_together

LAYOUTS = ["dp=1", "dp=2", "dp=3", "pp=2", "dp=2,pp=2", "pp=2,schedule=zero-bubble", "dp=1,recompute=true"]


def _job() -> Job:
    torch.manual_seed(0)
    return Job(
        model=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train_data=TensorDataset(torch.randn(60, 4), torch.randint(0, 3, (60,))),
        batch_size=12,
        microbatch_size=2,
        clip_grad_norm=1.0,
    )


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Keep the collector from hiding what it would collect."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_leaves_no_cycles(layout: str, request: pytest.FixtureRequest) -> None:
    """After the first steps a step leaves no reference cycle, which would keep tensors until a collection."""
    job, room = _job(), Mailroom()
    chosen = Layout.parse(layout)
    workers = [
        Worker(
            job.with_fields(model=copy.deepcopy(job.model)), chosen, MemoryTransport(rank, room), torch.device("cpu")
        )
        for rank in range(chosen.num_devices)
    ]
    batches = [worker.batches(0) for worker in workers]

    def step() -> None:
        drive_together([w.step(next(b)) for w, b in zip(workers, batches, strict=True)])

    step()
    step()
    request.getfixturevalue("collector_off")
    step()
    step()
    gc.collect()
    assert [type(each).__name__ for each in gc.garbage] == []
    assert all(not worker.engine.cells and not worker.engine.batch.loaded for worker in workers)
