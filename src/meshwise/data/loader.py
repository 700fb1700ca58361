"""Load microbatches of the job's data: what a sample looks like never depends on ranks or workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshwise.data.fetch import Fetcher, preserved_random_state, seed_random_state
from meshwise.data.order import mix, sample_key
from meshwise.data.source import inspect_data, read_source
from meshwise.errors import DataError

__all__ = ["MicrobatchLoader", "inspect_data"]

_STREAM_PURPOSE = 0x73747265616D

Request = tuple[int, int, Sequence[int]]  # tag, epoch, sample ids


class MicrobatchLoader:
    """Load microbatches from a map-style dataset, an iterable one or a user's DataLoader.

    Of a DataLoader its dataset, collate_fn, shuffle, drop_last and workers are taken; its batch_size is not.
    Random numbers that a sample or its collation draws from python, numpy or torch (CPU) are keyed by
    (seed, epoch, sample id), and the global random states are put back after every call. The draws of a
    ``collate_fn`` are keyed by the microbatch's first sample. Every rank builds its own loader.

    Args:
        data: Dataset, IterableDataset, DataLoader or a list of samples.
        seed: the job's seed.
        collate_fn: overrides the DataLoader's; default is torch's default_collate.
        num_workers: loader processes of this rank; overrides the DataLoader's.

    Raises:
        DataError: the data cannot be counted, or the DataLoader orders or splits samples in a way of its own.
    """

    def __init__(
        self,
        data: Any,
        *,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
    ) -> None:
        source = read_source(data)
        self.num_samples: int | None = source.num_samples
        self.shuffle: bool | None = source.shuffle
        self.drop_last: bool = source.drop_last
        self.num_workers: int = source.num_workers if num_workers is None else num_workers
        self._worker_options = dict(source.worker_options) if self.num_workers else {}
        self._fetcher = Fetcher(dataset=source.dataset, seed=seed, collate_fn=collate_fn or source.collate_fn)
        self._requests = _Requests()
        self._persistent: DataLoader[Any] | None = None

    def fetch(self, epoch: int, ids: Sequence[int]) -> Any:
        """Give the collated microbatch of these sample ids, fetched in this process.

        Its tensors are fresh, contiguous and aligned. An error of the dataset comes through as it is, with a
        note that names the sample. An epoch is announced to a dataset that has ``set_epoch`` by `stream`
        and `iterate` only.

        Raises:
            DataError: the data is a stream, which has no ids; use `iterate`.
        """
        self._refuse_stream()
        return self._fetcher.fetch(epoch, ids)

    def stream(self, epoch: int, plan: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, Any]]:
        """Give (tag, collated microbatch) for each (tag, sample ids) of a plan, in the plan's order.

        With workers, some microbatches are prefetched in other processes; the values are the same. The plan
        may be lazy. Workers end when the iterator is dropped, unless the DataLoader has persistent_workers
        (then a new stream ends the one before it).

        Raises:
            DataError: the data is a stream, which has no ids; use `iterate`.
        """
        self._refuse_stream()
        self._announce(epoch)
        if self.num_workers == 0:
            return ((tag, self._fetcher.fetch(epoch, ids)) for tag, ids in plan)
        self._requests.source = ((tag, epoch, ids) for tag, ids in plan)
        return self._prefetched(iter(self._worker_loader()))

    def iterate(self, epoch: int, batch_size: int) -> Iterator[list[Any]]:
        """Give the samples of each step of a stream: lists of ``batch_size`` samples, the last maybe shorter.

        Every rank reads the whole stream, in this process, and keeps the samples that are its own (collate
        them with `collate`): each item counts once over all ranks, also when the source splits itself by
        worker. The cost is that N ranks read and decode everything N times, nothing is prefetched, and a
        resumed run reads what came before and drops it (``itertools.islice``). A source that splits itself
        by rank must not. Item k is read with the random states keyed by (seed, epoch, k).

        Raises:
            DataError: the data has ids; use `fetch` or `stream`.
        """
        if self.num_samples is not None:
            raise DataError("iterate is for streams; this data has ids: use fetch or stream.")
        self._announce(epoch)
        return self._read(epoch, batch_size)

    def _read(self, epoch: int, batch_size: int) -> Iterator[list[Any]]:
        seed = self._fetcher.seed
        with preserved_random_state():
            seed_random_state(mix(_STREAM_PURPOSE, seed, epoch))
            items = iter(self._fetcher.dataset)
        for first in itertools.count(0, batch_size):
            keys = (sample_key(seed, epoch, first + place) for place in range(batch_size))
            with preserved_random_state():
                samples = list(_read_keyed(items, keys))
            if samples:
                yield samples
            if len(samples) < batch_size:
                return

    def collate(self, epoch: int, ids: Sequence[int], samples: list[Any]) -> Any:
        """Collate samples of a stream into a microbatch; ``ids`` are their places in the epoch, from 0."""
        return self._fetcher.collate(epoch, ids, samples)

    def _announce(self, epoch: int) -> None:
        """Tell the epoch to a dataset that wants to know, as a DistributedSampler's owner would."""
        set_epoch = getattr(self._fetcher.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _refuse_stream(self) -> None:
        if self.num_samples is None:
            kind = type(self._fetcher.dataset).__name__
            raise DataError(f"{kind} is a stream: its samples have no ids, only an order; use iterate.")

    def _prefetched(self, microbatches: Any) -> Iterator[tuple[int, Any]]:
        """Pass microbatches on; after an error end the workers now, for a garbage collection takes 5 s to."""
        try:
            yield from microbatches
        except Exception:
            microbatches._shutdown_workers()
            self._persistent = None
            raise

    def _worker_loader(self) -> DataLoader[Any]:
        if self._persistent is not None:
            return self._persistent
        loader: DataLoader[Any] = DataLoader(
            _Microbatches(self._fetcher),
            sampler=self._requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # else starting workers draws from the global state
            **self._worker_options,
        )
        if loader.persistent_workers:
            self._persistent = loader
        return loader


class _Microbatches(Dataset[Any]):
    """Let a DataLoader ask for whole microbatches, as if each were one sample."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __getitem__(self, request: Request) -> tuple[int, Any]:
        tag, epoch, ids = request
        return tag, self.fetcher.fetch(epoch, ids)


class _Requests:
    """Stand as a DataLoader's sampler: the requests of the stream that is running."""

    source: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.source)


def _read_keyed(items: Iterator[Any], keys: Iterable[int]) -> Iterator[Any]:
    """Read one item for each key, with the random states seeded by it, until the items end."""
    for key in keys:
        seed_random_state(key)
        try:
            yield next(items)
        except StopIteration:
            return


def _as_it_is(value: Any) -> Any:
    return value
