"""Datasets that draw random numbers, and how nested batches are compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Noisy(Dataset[Any]):
    """Give the sample's id and one random number from each library."""

    def __init__(self, num_samples: int = 12) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand((), dtype=torch.float64)])
        return {"id": index, "noise": noise.double()}


class NoisyBatches(Noisy):
    """Fetch several samples at once, drawing as many numbers as there are samples."""

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[index] for index in ids]


class QuietBatches(Noisy):
    """Fetch several samples at once without drawing, and count the calls."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("fetched one by one")

    def __getitems__(self, ids: list[int]) -> list[Any]:
        self.calls += 1
        return [{"id": index} for index in ids]


class Items(IterableDataset[Any]):
    """Give 0..n-1, split by worker if asked, and one random number with each."""

    def __init__(self, num_items: int = 24, splits: bool = False) -> None:
        self.num_items, self.splits = num_items, splits

    def __iter__(self) -> Any:
        info = get_worker_info() if self.splits else None
        start, stride = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, self.num_items, stride):
            yield index, random.random() + np.random.rand() + float(torch.rand(()))


def same(a: Any, b: Any) -> bool:
    """Compare nested batches bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
