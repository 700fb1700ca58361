"""BatchNorm over the whole batch: as one device with a plain loop, on any layout."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshwise as mw
from scenarios import assert_equal, assert_same_bits, train_in_memory, train_plainly


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
        model=lambda: ResNet().double(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train_data=TensorDataset(images, labels),
        batch_size=13,
        microbatch_size=[3, 4, 1, 5],
        shuffle=False,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resnet_equals_the_plain_loop_on_the_whole_batch(layout: str) -> None:
    """Losses, weights, running statistics and counters of 3 steps are those of a plain loop, to 1e-10 in float64."""
    assert_equal(train_in_memory(make_job(), layout), train_plainly(make_job()))


def test_resnet_is_bit_identical_under_all_layouts() -> None:
    """Every layout, uneven slices included, ends in the same bits."""
    one = train_in_memory(make_job(), "dp=1")
    for layout in LAYOUTS[1:]:
        assert_same_bits(train_in_memory(make_job(), layout), one)


@pytest.mark.parametrize("layout", ["dp=2", "dp=3", "pp=2"])
def test_microbatch_statistics_are_the_same_under_all_layouts(layout: str) -> None:
    """With batch_norm="microbatch" running values fold in microbatch order, whoever holds the microbatches."""
    job = make_job().with_fields(batch_norm="microbatch")
    assert_same_bits(train_in_memory(job, layout), train_in_memory(job, "dp=1"))
