"""Fetch the samples of one microbatch, with the global random states keyed by (seed, epoch, sample)."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from meshwise.data.order import mix, sample_key
from meshwise.tree import map_leaves

_COLLATE_PURPOSE = 0x636F6C6C617465


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """Hold the global random states of python, numpy and torch (the CPU generator) at one moment."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    def moved(self, later: RandomState) -> list[str]:
        """Name the libraries whose state differs from a later one: something was drawn in between."""
        same_numpy = all(np.array_equal(a, b) for a, b in zip(self.numpy, later.numpy, strict=True))
        same = {
            "python": self.python == later.python,
            "numpy": same_numpy,
            "torch": torch.equal(self.torch, later.torch),
        }
        return [name for name, equal in same.items() if not equal]


def random_state() -> RandomState:
    """Read the three global random states."""
    return RandomState(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state())


def seed_random_state(key: int) -> None:
    """Seed the three global random states from one key.

    numpy and torch take 32 bits and run the same algorithm, so they get different halves of the key.
    """
    random.seed(key)
    np.random.seed(key >> 31)
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put the three global random states back at the end."""
    state = random_state()
    try:
        yield
    finally:
        random.setstate(state.python)
        np.random.set_state(state.numpy)
        torch.set_rng_state(state.torch)


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """Fetch and collate samples of a map-style dataset; small enough to send to a worker process.

    ``collate_fn`` None means torch's default_collate. What is fetched is a function of (seed, epoch, ids).
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def fetch(self, epoch: int, ids: Sequence[int]) -> Any:
        """Give the collated microbatch of these samples (at least one) in fresh, contiguous tensors."""
        if self.collate_fn is None:
            rows = _tensor_rows(self.dataset, ids)
            if rows is not None:
                return rows
        return self.collate(epoch, ids, self.samples(epoch, ids))

    def samples(self, epoch: int, ids: Sequence[int]) -> list[Any]:
        """Give the samples one by one, each fetched with the random states keyed to it."""
        if _draws_nothing(self.dataset):
            return [self.dataset[index] for index in ids]
        with preserved_random_state():
            if _has_batch_access(self.dataset):
                return self._samples_at_once(epoch, ids)
            return [self._sample(epoch, index, self.dataset.__getitem__) for index in ids]

    def _sample(self, epoch: int, index: int, get: Callable[[int], Any]) -> Any:
        seed_random_state(sample_key(self.seed, epoch, index))
        try:
            return get(index)
        except Exception as error:
            kind = type(self.dataset).__name__
            if sys.version_info >= (3, 11):
                error.add_note(f"meshwise: while fetching sample {index} of {kind} in epoch {epoch}")
            raise

    def _samples_at_once(self, epoch: int, ids: Sequence[int]) -> list[Any]:
        """Use the dataset's __getitems__; if that drew random numbers, fetch again, one by one and keyed."""
        get = self.dataset.__getitems__
        seed_random_state(sample_key(self.seed, epoch, ids[0]))
        before = random_state()
        found = list(get(list(ids)))
        if not before.moved(random_state()):
            return found
        return [self._sample(epoch, index, lambda one: get([one])[0]) for index in ids]

    def collate(self, epoch: int, ids: Sequence[int], samples: list[Any]) -> Any:
        """Collate samples; the user's function draws from states keyed by the microbatch's first sample."""
        if self.collate_fn is None:
            return default_collate(samples)
        with preserved_random_state():
            seed_random_state(mix(_COLLATE_PURPOSE, self.seed, epoch, ids[0], len(ids)))
            return map_leaves(_own, self.collate_fn(samples))


def _tensor_rows(dataset: Any, ids: Sequence[int]) -> list[torch.Tensor] | None:
    """Select rows of a TensorDataset (or a Subset of one), as default_collate would give them."""
    while type(dataset) is Subset:
        ids = [dataset.indices[index] for index in ids]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    index = torch.from_numpy(np.array(ids, dtype=np.int64))  # much faster than from a list
    return [tensor.index_select(0, index.to(tensor.device)).contiguous() for tensor in dataset.tensors]


def _draws_nothing(dataset: Any) -> bool:
    """Say whether fetching surely runs no code of the user, so that nothing need be seeded."""
    kind = type(dataset)
    if kind is Subset:
        return _draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    if kind is StackDataset:
        return all(map(_draws_nothing, _stacked(dataset)))
    return kind in (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray)


def _has_batch_access(dataset: Any) -> bool:
    """Say whether the dataset itself fetches several samples at once; torch's wrappers only loop."""
    kind = type(dataset)
    if kind is Subset:
        return _has_batch_access(dataset.dataset)
    if kind is StackDataset:
        return any(map(_has_batch_access, _stacked(dataset)))
    return callable(getattr(dataset, "__getitems__", None))


def _stacked(dataset: StackDataset[Any]) -> list[Any]:
    parts = dataset.datasets
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


def _own(value: Any) -> Any:
    """Copy a batch's tensor into contiguous, aligned memory of its own: bits may depend on both."""
    if not isinstance(value, torch.Tensor):
        return value
    dense = value.layout is torch.strided and not value.is_nested
    return value.clone(memory_format=torch.contiguous_format) if dense else value.clone()
