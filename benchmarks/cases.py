"""The cases: a model, its data, and the sizes at which it is measured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import ResNet50, decoder, resnet, small_mlp, vgg16, wide_mlp

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """State a model, its data, and the sizes at which it is measured.

    ``batch``: samples of each rank of dp=2, and of one device; ``microbatch``: samples of each microbatch of a
    pipeline; ``cuts[s]``: indices at which the stages after the first begin, for s stages; ``target``: what the
    ratio of two exact replicas to DDP at its best settings should be at most.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Data]
    batch: int
    microbatch: int
    num_samples: int
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    target: float | None = None

    def make_data(self) -> Data:
        """Make the data, the same on every rank; kept, since several contenders may ask."""
        return _made(self.name)

    def stages(self, model: nn.Module, num_stages: int) -> list[nn.Sequential]:
        """Cut a Sequential at the case's cuts."""
        assert isinstance(model, nn.Sequential)
        edges = [0, *self.cuts[num_stages], len(model)]
        return [model[a:b] for a, b in itertools.pairwise(edges)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean cross entropy over all targets (classes last)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# ---- data --------------------------------------------------------------------------------------


def vectors(width: int, classes: int = 10) -> Callable[[int], Data]:
    """Give a function that makes random vectors with random classes."""
    return lambda count: (torch.randn(count, width), torch.randint(0, classes, (count,)))


def images(side: int, classes: int = 10) -> Callable[[int], Data]:
    """Give a function that makes random RGB images with random classes."""
    return lambda count: (torch.randn(count, 3, side, side), torch.randint(0, classes, (count,)))


def tokens(length: int = 64, vocabulary: int = 512) -> Callable[[int], Data]:
    """Give a function that makes random token ids, each sequence's target being the next ids."""

    def make(count: int) -> Data:
        ids = torch.randint(0, vocabulary, (count, length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return make


CASES = {
    case.name: case
    for case in (
        Case(
            name="mlp",
            target=0.50,
            build=small_mlp,
            data=vectors(784),
            batch=64,
            microbatch=64,
            num_samples=16384,
            cuts={2: (2,)},
        ),
        Case(
            name="wide-mlp",
            target=0.50,
            build=wide_mlp,
            data=vectors(2048, 2048),
            batch=64,
            microbatch=64,
            num_samples=4096,
            cuts={2: (8,), 4: (4, 8, 12)},
        ),
        Case(
            name="resnet",
            build=resnet,
            data=images(32),
            batch=32,
            microbatch=16,
            num_samples=2048,
            cuts={2: (4,), 4: (2, 4, 6)},
        ),
        Case(
            name="decoder",
            target=0.88,
            build=decoder,
            data=tokens(),
            batch=16,
            microbatch=8,
            num_samples=2048,
            cuts={2: (3,), 4: (2, 3, 4)},
        ),
        Case(
            name="vgg16-64",
            target=0.70,
            build=lambda: vgg16(64),
            data=images(64, 1000),
            batch=4,
            microbatch=2,
            num_samples=256,
            cuts={2: (12,), 4: (7, 12, 19)},
        ),
        Case(
            name="resnet50-96",
            target=0.92,
            build=ResNet50,
            data=images(96, 1000),
            batch=8,
            microbatch=4,
            num_samples=256,
        ),
        Case(
            name="vgg16-224",
            target=0.88,
            build=vgg16,
            data=images(224, 1000),
            batch=8,
            microbatch=2,
            num_samples=64,
            cuts={2: (12,), 4: (7, 12, 19)},
        ),
    )
}


@functools.cache
def _made(name: str) -> Data:
    torch.manual_seed(1)
    case = CASES[name]
    return case.data(case.num_samples)
