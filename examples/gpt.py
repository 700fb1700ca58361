"""Train a small GPT to predict the next byte of Python's own library.

It shows a tied output layer (one weight on the first and on the last stage), dropout, gradient clipping, a
schedule of the learning rate, and a last batch that is smaller than the others:

    meshwise train examples/gpt.py --devices 2 --layout pp=2 --set epochs=1
    meshwise train examples/gpt.py:job_small --devices 4 --layout dp=2,pp=2
"""

import argparse
import inspect
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import meshwise as mw

MODULES: tuple[ModuleType, ...] = (argparse, inspect)  # some 200,000 bytes


class Attention(nn.Module):
    """Mix each position with the positions before it, by several heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attend, then think: each on a normalised copy, added to the stream."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.down(self.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Predict the next of 256 bytes from up to ``context`` bytes."""

    def __init__(
        self, width: int = 64, depth: int = 4, num_heads: int = 4, context: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 256, bias=False)
        self.output.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes of shape (batch, length) to logits of shape (batch, length, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Give runs of ``context`` bytes, each with the same run one byte later as its target."""

    def __init__(self, text: bytes, context: int, runs: Sequence[int]) -> None:
        needed = (max(runs) + 1) * context + 1
        if len(text) < needed:
            raise ValueError(f"the last run ends at byte {needed}, but the text has {len(text)}")
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.runs = runs

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.runs[index] * self.context
        piece = self.bytes[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


def read_text() -> bytes:
    """Join the source files of some modules of the standard library."""
    return b"".join(Path(str(module.__file__)).read_bytes() for module in MODULES)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Give the mean cross entropy over all bytes, in nats."""
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), targets.flatten())


def warmup_then_cosine(step: int, num_warmup: int, num_steps: int) -> float:
    """Give the factor of the learning rate at an optimizer step: up in a line, then down along a cosine."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - num_warmup) / (num_steps - num_warmup))))


def job(width: int = 64, depth: int = 4, context: int = 64, num_runs: int = 1000, epochs: int = 8) -> mw.Job:
    """State the job: 48 runs a step; of the 1,000 in an epoch, 40 make its last step."""
    batch_size = 48
    num_steps = epochs * math.ceil(num_runs / batch_size)
    factor = partial(warmup_then_cosine, num_warmup=10, num_steps=num_steps)
    text = read_text()
    return mw.Job(
        name="gpt",
        model=partial(GPT, width=width, depth=depth, context=context),
        loss=token_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        train_data=Text(text, context, [run for run in range(num_runs * 11 // 10) if run % 11]),
        eval_data=Text(text, context, range(0, num_runs * 11 // 10, 11)),
        batch_size=batch_size,
        clip_grad_norm=1.0,
        epochs=epochs,
    )


def job_small() -> mw.Job:
    """State the job with two narrow blocks and 100 short runs: three steps, the last one of four."""
    return job(width=32, depth=2, context=16, num_runs=100, epochs=1).with_fields(name="gpt_small")


if __name__ == "__main__":
    print(mw.train(job(), devices=2, layout="pp=2"))
