"""The models that are measured. Those that a pipeline cuts are Sequential, so that both sides cut at one place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Bottleneck(nn.Module):
    """Add three convolutions with BatchNorm, the middle one narrow, to a shortcut, as a ResNet-50 block does."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inside, side, side) to (batch, 4 * width, side / stride, side / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.short(x))


class ResNet50(nn.Module):
    """Classify RGB images as ResNet-50 does (He and others 2015; the stride in the block's middle, as torchvision)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.norm1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        inside, stages = 64, []
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            blocks = [Bottleneck(inside, width, stride)]
            blocks += [Bottleneck(4 * width, width, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inside = 4 * width
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, classes)."""
        x = self.pool(self.relu(self.norm1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.mean(x).flatten(1))


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
