"""Coupled rows: where the samples of different microbatches meet, in tree order and bit for bit alike.

BatchNorm over the whole batch. With n values a channel in all, mean and variance fold from per-microbatch
(n, mean, M2) by Chan, Golub, LeVeque (1979). The backward of a normalization with fixed statistics gives
``dx' = dy w / s``, ``S1 = sum dy`` and ``S2 = sum dy xhat``; what the statistics add to it is
``-(w / s) (S1 / n + xhat S2 / n)``, with the sums over the whole batch.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import JobError
from ..grid import tree_fold
from ..model.graph import BatchNormRow
from ..parallel.transport import Group, Transport, wait_for

Wait = Generator[None, None, Any]


@dataclass(kw_only=True)
class RowState:
    """Hold the statistics of one coupled row in one step (float64, one entry a channel)."""

    count: float
    mean: Tensor
    var: Tensor
    eps: float

    def as_buffers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give mean and biased variance in the dtype of running statistics."""
        kind = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        return self.mean.to(kind), self.var.to(kind)


def gather_rows(transport: Transport, group: Group, local: Tensor, counts: list[int]) -> Wait:
    """Gather per-microbatch rows (microbatches x width, float64) from all replicas, in microbatch order."""
    if len(group) == 1:
        return local
    longest = max(counts)
    padded = local.new_zeros((longest, local.shape[1]))
    padded[: local.shape[0]] = local
    parts = yield from wait_for(transport.all_gather(padded, group))
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


def batch_moments(x: Tensor) -> Tensor:
    """Give one microbatch's (count, mean, M2) for each channel as a row of ``1 + 2 C`` float64 numbers."""
    dims = [d for d in range(x.ndim) if d != 1]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    var, mean = torch.var_mean(wide, dim=dims, correction=0)
    count = x.numel() // x.shape[1]
    return torch.cat([mean.new_tensor([count], dtype=torch.float64), mean.double(), var.double() * count])


def fold_moments(rows: Tensor, eps: float) -> RowState:
    """Fold the rows of all microbatches to the statistics of the batch."""
    channels = (rows.shape[1] - 1) // 2
    leaves = {(m, m + 1): (float(r[0]), r[1 : 1 + channels], r[1 + channels :]) for m, r in enumerate(rows)}
    count, mean, m2 = tree_fold(len(rows), leaves, _chan)
    if count < 2:
        raise JobError(
            "BatchNorm in training needs more than 1 value per channel in the whole batch; this batch has 1. "
            "Use a larger batch_size, or drop_last=True if it is the last batch."
        )
    return RowState(count=count, mean=mean, var=m2 / count, eps=eps)


Moments = tuple[float, Tensor, Tensor]


def _chan(a: Moments, b: Moments) -> Moments:
    count = a[0] + b[0]
    delta = b[1] - a[1]
    return count, a[1] + delta * (b[0] / count), a[2] + b[2] + delta * delta * (a[0] * b[0] / count)


def running_update(row: BatchNormRow, state: RowState, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Give the new running mean and (unbiased) variance after one batch."""
    unbiased = state.var * (state.count / (state.count - 1))
    new_mean = mean * (1 - row.momentum) + (state.mean * row.momentum).to(mean.dtype)
    new_var = var * (1 - row.momentum) + (unbiased * row.momentum).to(var.dtype)
    return new_mean, new_var


def correct_gradient(
    grad: Tensor, x: Tensor, state: RowState, weight: Tensor, s1: Tensor, s2: Tensor
) -> Tensor:
    """Add to a microbatch's gradient what its values did to the statistics (s1, s2: sums over the batch)."""
    scale = weight.double() / torch.sqrt(state.var + state.eps)
    slope = -scale * s2 / (state.count * torch.sqrt(state.var + state.eps))
    offset = -scale * s1 / state.count - slope * state.mean
    shape = [1, -1] + [1] * (x.ndim - 2)
    extra = torch.addcmul(offset.to(x.dtype).view(shape), x.detach(), slope.to(x.dtype).view(shape))
    return grad + extra
