"""What the job's data argument is: a dataset, a stream or a loader, and what may surprise its owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from meshwise.data.fetch import Fetcher, preserved_random_state, random_state
from meshwise.errors import DataError

_RANK_NAMES = {"get_rank", "get_world_size", "get_node_local_rank"}
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
_WORKER_OPTIONS = (
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Hold the data of a job and how its owner loads it.

    ``num_samples`` is None for a stream; ``shuffle`` is None where the owner did not say (no DataLoader).
    """

    dataset: Any
    num_samples: int | None
    collate_fn: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    num_workers: int = 0
    worker_options: Mapping[str, Any] = field(default_factory=dict)


def read_source(data: Any) -> Source:
    """Read a map-style dataset, an iterable one, or a DataLoader.

    Raises:
        DataError: the samples cannot be counted, or the loader orders or splits them in a way of its own.
    """
    if not isinstance(data, DataLoader):
        return Source(dataset=data, num_samples=_count_samples(data))
    reason = _refusal(data)
    if reason is not None:
        raise DataError(reason)
    return Source(
        dataset=data.dataset,
        num_samples=_count_samples(data.dataset),
        collate_fn=None if data.collate_fn is torch.utils.data.default_collate else data.collate_fn,
        shuffle=isinstance(_sampler(data), RandomSampler),
        drop_last=data.drop_last or bool(getattr(data.batch_sampler, "drop_last", False)),
        num_workers=data.num_workers,
        worker_options=_worker_options(data),
    )


def inspect_data(data: Any, *, batch_size: int | None = None) -> list[str]:
    """Say in plain sentences what about the data may surprise its owner; an empty list if nothing.

    Fetches three samples of a map-style dataset (never an item of a stream) and leaves the global random
    states as they were. ``batch_size`` is the job's, to compare with a DataLoader's. Call it on one rank.
    """
    warnings = []
    if isinstance(data, DataLoader):
        reason = _refusal(data)
        if reason is not None:
            return [reason]
        if batch_size is not None and data.batch_size != batch_size:
            warnings.append(
                f"the DataLoader has batch_size={data.batch_size}, the job batch_size={batch_size}; the "
                "job's counts: it is the number of samples of an optimizer step over all devices."
            )
        data = data.dataset
    if is_stream(data):
        return warnings + _inspect_stream(data)
    _count_samples(data)
    return warnings + _inspect_dataset(data)


def is_stream(dataset: Any) -> bool:
    """Say whether samples can only be read one after another."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _count_samples(dataset: Any) -> int | None:
    """Count the samples of a dataset, None for a stream; refuse what is neither."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        parts = ", ".join(repr(key) for key in list(dataset)[:4])
        raise DataError(f"the data is a {kind} of several parts ({parts}); pass one of them.")
    readable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if not readable or isinstance(dataset, (str, bytes)):
        raise DataError(
            f"the data is a {kind}; pass a Dataset, an IterableDataset, a DataLoader or a list of samples."
        )
    if is_stream(dataset):
        _refuse_single_use(dataset)
        return None
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{kind} has __getitem__ but no __len__; add it, or make it an IterableDataset.")
    if len(dataset) == 0:
        raise DataError(f"the data ({kind}) holds no samples.")
    return len(dataset)


def _refuse_single_use(dataset: Any) -> None:
    if isinstance(dataset, Iterator):
        raise DataError(
            f"the data is a {type(dataset).__name__}, which can be read only once; wrap it in an "
            "IterableDataset whose __iter__ starts again in each epoch."
        )


def _sampler(loader: DataLoader[Any]) -> Any:
    """Give the sampler that orders the samples, also one inside the user's own batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _refusal(loader: DataLoader[Any]) -> str | None:
    """Say why a DataLoader's order cannot be kept, or None."""
    if loader.batch_sampler is None:
        return (
            "the DataLoader has batch_size=None, so its dataset gives ready batches, which cannot be cut "
            "into microbatches; let the dataset give single samples."
        )
    if is_stream(loader.dataset):
        return None
    for sampler in (_sampler(loader), loader.batch_sampler):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return (
                f"the DataLoader splits its samples by rank itself ({type(sampler).__name__}), and meshwise "
                "gives each rank its part of every step: samples would be left out. Pass the plain dataset, "
                "or DataLoader(dataset, shuffle=True) without a sampler."
            )
    return _order_refusal(loader)


def _order_refusal(loader: DataLoader[Any]) -> str | None:
    sampler = _sampler(loader)
    why = (
        "The order of the samples must follow from (seed, epoch) alone, so that any number of ranks and a "
        "resumed run see the same one. Pass the plain dataset (a Subset for a part of it), or a DataLoader "
        "that says shuffle=True and no more."
    )
    if type(loader.batch_sampler) is not BatchSampler:
        return f"the DataLoader has a batch_sampler of its own ({type(loader.batch_sampler).__name__}). {why}"
    if type(sampler) not in (SequentialSampler, RandomSampler):
        return f"the DataLoader has a sampler of its own ({type(sampler).__name__}). {why}"
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None):
        return f"the DataLoader's RandomSampler draws with replacement or only some of the samples. {why}"
    return None


def _worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Give the DataLoader's arguments that say how workers run, nothing if it has none."""
    if loader.num_workers == 0:
        return {}
    return {name: getattr(loader, name) for name in _WORKER_OPTIONS}


def _inspect_stream(dataset: Any) -> list[str]:
    warnings = []
    if _asks_for_rank(type(dataset)):
        warnings.append(
            f"{type(dataset).__name__} seems to split itself by rank; every rank reads the whole stream and "
            "keeps its own samples, so this would lose some. Let it give the whole stream on every rank."
        )
    return warnings


def _asks_for_rank(kind: type) -> bool:
    """Say whether a method of the class names the rank or the number of ranks; runs nothing."""
    codes = [getattr(method, "__code__", None) for method in vars(kind).values()]
    words = {word for code in codes if code is not None for word in code.co_names + code.co_consts}
    return bool(words & (_RANK_NAMES | _RANK_VARIABLES))


def _inspect_dataset(dataset: Any) -> list[str]:
    """Fetch a few samples: do they draw from the global random states, are they the same twice?"""
    ids = sorted({0, len(dataset) // 2, len(dataset) - 1})
    fetcher = Fetcher(dataset=dataset, seed=0)
    with preserved_random_state():
        before = random_state()
        for index in ids:
            dataset[index]
        moved = before.moved(random_state())
        first, second = fetcher.samples(0, ids), fetcher.samples(0, ids)
    kind, warnings = type(dataset).__name__, []
    if moved:
        warnings.append(
            f"{kind} draws from the global random state of {' and '.join(moved)}; meshwise keys these draws "
            "by (seed, epoch, sample), so they are the same on any number of ranks and workers."
        )
    if not _same(first, second):
        warnings.append(
            f"{kind} gives another value when the same sample is fetched again with the same seed (a "
            "generator or a counter of its own?), so results will depend on ranks and workers, and a resumed "
            "run differs. Draw from random, numpy.random or torch instead, which meshwise keys by sample."
        )
    return warnings


def _same(a: Any, b: Any) -> bool:
    """Compare two samples by value; what has no value to compare counts as the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(_as_bytes(a), _as_bytes(b))
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    has_value = getattr(type(a), "__eq__", None) is not getattr(object, "__eq__", None)
    return (not has_value) or bool(a == b) or str(a) == str(b) == "nan"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, so that NaN equals NaN."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.detach().contiguous().flatten().view(torch.uint8)
