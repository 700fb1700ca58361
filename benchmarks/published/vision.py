"""Image models of the published runs: AlexNet, VGG, ResNet, Inception v3, and torchgpipe's U-Net."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Image:
    """State an image model; ``target`` is the shape of one sample's target beside the batch."""

    kind: str
    side: int = 224
    depth: int = 0
    norm: bool = False
    blocks: int = 0
    channels: int = 0
    target: tuple[int, ...] = ()


VISION = {
    "alexnet": Image(kind="alexnet"),
    "vgg16_bn": Image(kind="vgg", norm=True),
    "vgg16": Image(kind="vgg"),
    "resnet-50": Image(kind="resnet", depth=50),
    "resnet50": Image(kind="resnet", depth=50),
    "resnet-101": Image(kind="resnet", depth=101),
    "resnet101": Image(kind="resnet", depth=101),
    "resnet-152": Image(kind="resnet", depth=152),
    "resnet152": Image(kind="resnet", depth=152),
    "inceptionv3": Image(kind="inception", side=299),
    "inception v3": Image(kind="inception", side=299),
}


def image_loss(output: Tensor, target: Tensor) -> Tensor:
    """Give the mean cross entropy of classes."""
    return F.cross_entropy(output.float(), target) if output.dim() == 2 else output.float().mean()


def vision_model(image: Image) -> nn.Module:
    """Make an image model."""
    if image.kind == "alexnet":
        return alexnet()
    if image.kind == "vgg":
        return vgg16(image.norm)
    if image.kind == "inception":
        return inception()
    if image.kind == "unet":
        return UNet(image.blocks, image.channels)
    return resnet(image.depth)


def _dense(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def alexnet() -> nn.Sequential:
    """Make AlexNet with one column of filters (arXiv:1404.5997)."""
    sizes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
    layers: list[nn.Module] = []
    for k, (inside, outside, kernel, stride, padding) in enumerate(sizes):
        layers += [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if k in (0, 1, 4) else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6), _dense(256 * 36, 4096, 4096, 1000))


def vgg16(norm: bool) -> nn.Sequential:
    """Make VGG-16, with BatchNorm or without."""
    layers: list[nn.Module] = []
    inside = 3
    for number, outside in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(number):
            layers.append(nn.Conv2d(inside, outside, 3, padding=1))
            layers += [nn.BatchNorm2d(outside)] if norm else []
            layers.append(nn.ReLU(inplace=True))
            inside = outside
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, _dense(512 * 49, 4096, 4096, 1000))


class Bottleneck(nn.Module):
    """Add three convolutions to a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inside, side, side) to (batch, 4 * width, side / stride, side / stride)."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.short(x), inplace=True)


def resnet(depth: int) -> nn.Sequential:
    """Make a ResNet of bottlenecks."""
    counts = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for k, count in enumerate(counts):
        for block in range(count):
            layers.append(Bottleneck(inside, 64 << k, 2 if k and not block else 1))
            inside = 4 * (64 << k)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


# ---- Inception v3 (arXiv:1512.00567) --------------------------------------------------------------------------


class Conv(nn.Module):
    """Convolve, normalise, and cut off below zero."""

    def __init__(
        self, inside: int, outside: int, kernel: int | tuple[int, int], stride: int = 1, pad: object = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, kernel, stride, pad, bias=False)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        """Map to ``outside`` channels."""
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """Put the channels of several branches side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Run all branches on the input."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _seq(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def _pooled(inside: int, outside: int) -> nn.Sequential:
    return _seq(nn.AvgPool2d(3, 1, 1), Conv(inside, outside, 1))


def _square(n: int, pool: int) -> Branches:
    small = _seq(Conv(n, 48, 1), Conv(48, 64, 5, pad=2))
    double = _seq(Conv(n, 64, 1), Conv(64, 96, 3, pad=1), Conv(96, 96, 3, pad=1))
    return Branches(Conv(n, 64, 1), small, double, _pooled(n, pool))


def _long(n: int, c: int) -> Branches:
    flat, high = ((1, 7), (0, 3)), ((7, 1), (3, 0))

    def row(*steps: tuple[int, int, tuple[tuple[int, int], tuple[int, int]]]) -> list[nn.Module]:
        return [Conv(a, b, kernel, pad=pad) for a, b, (kernel, pad) in steps]

    one = _seq(Conv(n, c, 1), *row((c, c, flat), (c, 192, high)))
    two = _seq(Conv(n, c, 1), *row((c, c, high), (c, c, flat), (c, c, high), (c, 192, flat)))
    return Branches(Conv(n, 192, 1), one, two, _pooled(n, 192))


def _wide(n: int) -> Branches:
    def fork(inside: int) -> Branches:
        return Branches(Conv(inside, 384, (1, 3), pad=(0, 1)), Conv(inside, 384, (3, 1), pad=(1, 0)))

    return Branches(
        Conv(n, 320, 1), _seq(Conv(n, 384, 1), fork(384)), _seq(Conv(n, 448, 1), Conv(448, 384, 3, pad=1), fork(384)),
        _pooled(n, 192),
    )  # fmt: skip


def inception() -> nn.Sequential:
    """Make Inception v3 without its second head."""
    stem = [Conv(3, 32, 3, 2), Conv(32, 32, 3), Conv(32, 64, 3, pad=1), nn.MaxPool2d(3, 2), Conv(64, 80, 1)]
    stem += [Conv(80, 192, 3), nn.MaxPool2d(3, 2), _square(192, 32), _square(256, 64), _square(288, 64)]
    less = Branches(
        Conv(288, 384, 3, 2), _seq(Conv(288, 64, 1), Conv(64, 96, 3, pad=1), Conv(96, 96, 3, 2)), nn.MaxPool2d(3, 2)
    )
    long = [_long(768, c) for c in (128, 160, 160, 192)]
    half = _seq(Conv(768, 192, 1), Conv(192, 192, (1, 7), pad=(0, 3)), Conv(192, 192, (7, 1), pad=(3, 0)))
    half.append(Conv(192, 192, 3, 2))
    least = Branches(_seq(Conv(768, 192, 1), Conv(192, 320, 3, 2)), half, nn.MaxPool2d(3, 2))
    end = [least, _wide(1280), _wide(2048), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*stem, less, *long, *end)


# ---- torchgpipe's U-Net ------------------------------------------------------------------------------------------


def _stack(inside: int, middle: int, outside: int, count: int) -> nn.Sequential:
    """Make ``count`` convolutions, each with dropout, BatchNorm and a leaky ReLU."""
    widths = [inside, *[middle] * (count - 1), outside]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.Dropout2d(0.1), nn.BatchNorm2d(b), nn.LeakyReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Go down five levels and up again, with shortcuts across (kakaobrain/torchgpipe, benchmarks/models/unet)."""

    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        widths = [channels << k for k in range(5)]
        steps = zip([3, *widths[:-1]], widths, strict=True)
        self.down = nn.ModuleList(_stack(a, b, b, blocks) for a, b in steps)
        self.middle = _stack(widths[-1], 2 * widths[-1], widths[-1], blocks)
        self.up = nn.ModuleList(_stack(2 * b, b // 2, b // 2, blocks) for b in reversed(widths))
        self.last = nn.Conv2d(channels // 2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, 1, side, side)."""
        kept = []
        for stack in self.down:
            x = stack(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for stack in self.up:
            x = stack(torch.cat([kept.pop(), F.interpolate(x, scale_factor=2.0)], 1))
        return self.last(x)
