"""The jobs that are predicted: models of many kinds, small enough to run each layout in a second or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshwise as mw

from ..models import ResNet50, decoder, resnet, small_mlp, vgg16, wide_mlp

Make = Callable[[], mw.Job]


class UNet(nn.Module):
    """Label every pixel: two levels down, two up, with skips between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(3, width), self._pair(width, 2 * width)
        self.bottom = self._pair(2 * width, 4 * width)
        self.up2, self.up1 = self._pair(6 * width, 2 * width), self._pair(3 * width, width)
        self.out = nn.Conv2d(width, 4, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    @staticmethod
    def _pair(inside: int, outside: int) -> nn.Sequential:
        first, second = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, 4, side, side)."""
        high = self.down1(x)
        low = self.down2(self.pool(high))
        y = self.bottom(self.pool(low))
        y = self.up2(torch.cat([self.grow(y), low], 1))
        return self.out(self.up1(torch.cat([self.grow(y), high], 1)))


class Recurrent(nn.Module):
    """Predict the next token with an LSTM."""

    def __init__(self, vocabulary: int = 256, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, vocabulary)."""
        return self.head(self.lstm(self.embedding(ids))[0])


class Encoder(nn.Module):
    """Classify texts with torch's own encoder layers."""

    def __init__(self, vocabulary: int = 1000, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = (nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1) for _ in range(depth))
        self.layers, self.head = nn.ModuleList(layer), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, length) to (batch, 10)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def _tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def _job(model: Any, data: TensorDataset, batch: int, microbatch: int, **fields: Any) -> mw.Job:
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": _sgd, **fields}
    return mw.Job(model=model, train_data=data, batch_size=batch, microbatch_size=microbatch, **settings)


def _vectors(count: int, width: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, width), torch.randint(0, 10, (count,)))


def _images(count: int, side: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, side, side), torch.randint(0, 10, (count,)))


def _texts(count: int, length: int, vocabulary: int) -> TensorDataset:
    ids = torch.randint(0, vocabulary, (count, length + 1))
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _labelled(count: int, length: int, vocabulary: int) -> TensorDataset:
    return TensorDataset(torch.randint(0, vocabulary, (count, length)), torch.randint(0, 10, (count,)))


def _masks(count: int, side: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, side, side), torch.randint(0, 4, (count, side, side)))


JOBS: dict[str, Make] = {
    "mlp": lambda: _job(small_mlp, _vectors(512, 784), 64, 16),
    "mlp, AdamW": lambda: _job(small_mlp, _vectors(512, 784), 256, 64, optimizer=_adamw),
    "wide MLP": lambda: _job(lambda: wide_mlp(1024, 8), _vectors(512, 1024), 128, 32),
    "wide MLP, AdamW": lambda: _job(lambda: wide_mlp(2048, 6), _vectors(512, 2048), 64, 16, optimizer=_adamw),
    "vgg16, 64 px": lambda: _job(lambda: vgg16(64, 10), _images(64, 64), 16, 4),
    "vgg16, 96 px": lambda: _job(lambda: vgg16(96, 10), _images(32, 96), 8, 2),
    "ResNet, 32 px": lambda: _job(resnet, _images(256, 32), 64, 16),
    "ResNet-50, 64 px": lambda: _job(ResNet50, _images(32, 64), 16, 4),
    "U-Net": lambda: _job(UNet, _masks(64, 64), 16, 4),
    "decoder": lambda: _job(decoder, _texts(256, 64, 512), 32, 8, loss=_tokens_loss, optimizer=_adamw),
    "decoder, clipped": lambda: _job(
        lambda: decoder(512, 6, 2000, 128),
        _texts(64, 128, 2000),
        16,
        4,
        loss=_tokens_loss,
        optimizer=_adamw,
        clip_grad_norm=1.0,
    ),
    "encoder": lambda: _job(Encoder, _labelled(256, 64, 1000), 32, 8, optimizer=_adamw),
    "LSTM": lambda: _job(Recurrent, _texts(256, 32, 256), 32, 8, loss=_tokens_loss),
}
