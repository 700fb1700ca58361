"""BatchNorm over the whole batch: as one device with a plain loop, on any layout."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshwise as mw
from meshwise.layout import Layout
from meshwise.parallel.transport import Mailroom, MemoryTransport
from meshwise.runtime.state import gather_state
from meshwise.runtime.worker import Worker, drive_together


class Block(nn.Module):
    """A residual block with in-place ReLU, as in ResNet."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        same = inner == outer and stride == 1
        self.down = None if same else nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to its input."""
        skip = x if self.down is None else self.down(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += skip
        return self.relu(y)


class ResNet(nn.Module):
    """A small ResNet for 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = Block(8, 8, 1)
        self.layer2 = Block(8, 16, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(self.pool(x), 1))


STEPS = 3
LAYOUTS = ("dp=1", "dp=2", "dp=3", "pp=2", "pp=2,schedule=gpipe", "dp=2,pp=2", "dp=3,recompute=true")


def make_job() -> mw.Job:
    """Make a job with uneven slices: 13 samples in microbatches of 3, 4, 1 and 5."""
    torch.manual_seed(0)
    images = torch.randn(13 * STEPS, 3, 8, 8, dtype=torch.float64)
    labels = torch.randint(0, 5, (13 * STEPS,))
    return mw.Job(
        model=ResNet().double(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train_data=TensorDataset(images, labels),
        batch_size=13,
        microbatch_size=[3, 4, 1, 5],
        shuffle=False,
    )


def plain_loop(job: mw.Job) -> dict[str, Tensor]:
    """Train on one device, the whole batch at once."""
    model = copy.deepcopy(job.model)
    assert isinstance(model, nn.Module)
    optimizer = job.optimizer(model.parameters())
    for step in range(STEPS):
        images, labels = (t[13 * step : 13 * step + 13] for t in job.train_data.tensors)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return dict(model.state_dict())


def train(job: mw.Job, layout: str) -> dict[str, Tensor]:
    """Train with all ranks of a layout in this process."""
    mesh, room = Layout.parse(layout), Mailroom()
    workers = [
        Worker(job.with_fields(model=copy.deepcopy(job.model)), mesh, MemoryTransport(r, room), torch.device("cpu"))
        for r in range(mesh.num_devices)
    ]
    for batches in zip(*(w.batches(0) for w in workers), strict=True):
        drive_together([w.step(b) for w, b in zip(workers, batches, strict=True)])
    for stage_copies in (workers[i :: mesh.pp] for i in range(mesh.pp)):
        for other in stage_copies[1:]:
            pairs = zip(other.model.buffers(), stage_copies[0].model.buffers(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    state: Any = drive_together([gather_state(w) for w in workers])[0]
    return dict(state.tensors)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Give the largest difference between two states, counters included."""
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resnet_equals_the_plain_loop_on_the_whole_batch(layout: str) -> None:
    """Weights, running statistics and counters after 3 steps are those of a plain loop, to 1e-10 in float64."""
    job = make_job()
    assert largest_difference(train(job, layout), plain_loop(job)) < 1e-10


def test_resnet_is_bit_identical_under_all_layouts() -> None:
    """Every layout, uneven slices included, ends in the same bits."""
    job = make_job()
    one = train(job, "dp=1")
    for layout in LAYOUTS[1:]:
        other = train(job, layout)
        assert all(torch.equal(one[k], other[k]) for k in one), layout


@pytest.mark.parametrize("layout", ["dp=2", "dp=3", "pp=2"])
def test_microbatch_statistics_are_the_same_under_all_layouts(layout: str) -> None:
    """With batch_norm="microbatch" running values fold in microbatch order, whoever holds the microbatches."""
    job = make_job().with_fields(batch_norm="microbatch", train_data=make_job().train_data)
    one, other = train(job, "dp=1"), train(job, layout)
    assert all(torch.equal(one[k], other[k]) for k in one)
