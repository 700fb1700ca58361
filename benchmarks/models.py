"""The models that are measured: each a Sequential, so that both sides cut it at the same places."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """State a model, its data, and the sizes at which it is measured.

    ``batch``: samples a rank without a pipeline; ``microbatch``: samples of one of the 8 microbatches of a
    pipeline; ``cuts[s]``: indices at which the stages after the first begin, for s stages.
    """

    name: str
    build: Callable[[], nn.Sequential]
    data: Callable[[int], Data]
    batch: int
    microbatch: int
    num_samples: int
    cuts: dict[int, tuple[int, ...]]
    note: str = ""

    def stages(self, model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
        """Cut a model at the case's cuts."""
        edges = [0, *self.cuts[num_stages], len(model)]
        return [model[a:b] for a, b in itertools.pairwise(edges)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean cross entropy over all targets (classes last)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# ---- layers ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Add two convolutions with BatchNorm to a shortcut, as a basic ResNet block does."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inside, side, side) to (batch, outside, side / stride, side / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Embedding(nn.Module):
    """Embed tokens and their positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (batch, length) to (batch, length, width)."""
        return self.tokens(ids) + self.positions


class DecoderBlock(nn.Module):
    """Run causal attention and a feed-forward layer, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# ---- models ------------------------------------------------------------------------------------


def small_mlp() -> nn.Sequential:
    """Build 784-256-10."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def wide_mlp(width: int = 2048, depth: int = 8) -> nn.Sequential:
    """Build ``depth`` linear layers of one width, each with a ReLU."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def resnet() -> nn.Sequential:
    """Build a stem, six basic blocks of width 16 to 64, and a head, for 32 x 32 images."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    shapes = ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(stem, *(Block(*shape) for shape in shapes), head)


def decoder(width: int = 256, depth: int = 4, vocabulary: int = 512, length: int = 64) -> nn.Sequential:
    """Build a causal language model."""
    blocks = [DecoderBlock(width, heads=4) for _ in range(depth)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return nn.Sequential(Embedding(vocabulary, length, width), *blocks, head)


def vgg16(image: int = 224, classes: int = 1000) -> nn.Sequential:
    """Build VGG16 (Simonyan and Zisserman 2014, column D) layer by layer."""
    layers: list[nn.Module] = []
    inside = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
            inside = width
        layers.append(nn.MaxPool2d(2))
    flat = 512 * (image // 32) ** 2
    layers += [nn.Flatten(), nn.Linear(flat, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers)


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
            build=small_mlp,
            data=vectors(784),
            batch=64,
            microbatch=64,
            num_samples=16384,
            cuts={2: (2,)},
        ),
        Case(
            name="wide-mlp",
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
            note='batch_norm="microbatch": both sides use the statistics of each microbatch',
        ),
        Case(
            name="decoder",
            build=decoder,
            data=tokens(),
            batch=16,
            microbatch=8,
            num_samples=2048,
            cuts={2: (3,), 4: (2, 3, 4)},
        ),
        Case(
            name="vgg16-64",
            build=lambda: vgg16(64),
            data=images(64, 1000),
            batch=4,
            microbatch=2,
            num_samples=256,
            cuts={2: (12,), 4: (7, 12, 19)},
        ),
        Case(
            name="vgg16-224",
            build=vgg16,
            data=images(224, 1000),
            batch=2,
            microbatch=1,
            num_samples=64,
            cuts={2: (12,), 4: (7, 12, 19)},
        ),
    )
}
FULL_ONLY = ("vgg16-224",)
