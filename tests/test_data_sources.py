"""Streams, and what the data argument may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from meshwise.data.fetch import random_state
from meshwise.data.loader import MicrobatchLoader, inspect_data
from meshwise.errors import DataError
from noisy import Items, Noisy, same

SIZES = [1, 2, 3, 7, 12]
BATCHES = [1, 2, 3, 4, 12, 13]
ORDER_8_0_0 = [5, 2, 0, 4, 6, 1, 3, 7]
MIX_1_2_3 = 1355775664812041193




# Streams


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("batch_size", [1, 5, 8, 24, 30])
def test_every_item_of_a_stream_comes_once_with_its_own_noise(splits: bool, batch_size: int) -> None:
    """Whatever the step size, and if the source splits itself by worker, items are 0..23 once (B064)."""
    loader = MicrobatchLoader(Items(splits=splits), seed=4)
    steps = list(loader.iterate(0, batch_size))
    assert [len(step) for step in steps[:-1]] == [batch_size] * (len(steps) - 1)
    items = [item for step in steps for item in step]
    assert [index for index, _ in items] == list(range(24))
    assert items == [item for step in MicrobatchLoader(Items(), seed=4).iterate(0, 7) for item in step]
    assert len({noise for _, noise in items}) == 24


def test_streams_leave_the_global_states_alone_and_differ_by_epoch() -> None:
    """Between the steps of a stream the training's own random states are in force."""
    loader, before = MicrobatchLoader(Items(6), seed=4), random_state()
    for _ in loader.iterate(0, 2):
        assert before.moved(random_state()) == []
    assert list(loader.iterate(0, 6)) != list(loader.iterate(1, 6))
    assert same(loader.collate(0, [0, 1], [1, 2]), torch.tensor([1, 2]))


def test_the_epoch_is_announced() -> None:
    """A dataset that has set_epoch learns the epoch."""

    class Told(Items):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Told()
    next(MicrobatchLoader(data, seed=0).iterate(3, 2))
    assert data.epoch == 3


def test_streams_have_no_ids_and_datasets_are_no_streams() -> None:
    """The wrong way to read is refused with the right one."""
    with pytest.raises(DataError, match="use iterate"):
        MicrobatchLoader(Items(), seed=0).fetch(0, [0])
    with pytest.raises(DataError, match="use iterate"):
        MicrobatchLoader(Items(), seed=0).stream(0, [])
    with pytest.raises(DataError, match="use fetch or stream"):
        MicrobatchLoader(Noisy(), seed=0).iterate(0, 2)
    assert MicrobatchLoader(Items(), seed=0).num_samples is None


# The data argument


def test_what_a_dataloader_says_is_taken() -> None:
    """Dataset, collate function, shuffle, drop_last and workers of a DataLoader count."""
    loader = MicrobatchLoader(
        DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True, num_workers=2, collate_fn=list),
        seed=0,
    )
    assert (loader.num_samples, loader.shuffle, loader.drop_last, loader.num_workers) == (12, True, True, 2)
    assert [sample["id"] for sample in loader.fetch(0, [2, 1])] == [2, 1]
    assert MicrobatchLoader(DataLoader(Noisy()), seed=0).shuffle is False
    assert MicrobatchLoader(Noisy(), seed=0).shuffle is None
    assert MicrobatchLoader(DataLoader(Items(), batch_size=4), seed=0).num_samples is None


class Pairs(torch.utils.data.Sampler[list[int]]):
    """Stand for a batch sampler of the user's own."""

    def __iter__(self) -> Any:
        return iter([[0, 1]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(Noisy(), sampler=DistributedSampler(Noisy(), 2, 0)),
            "splits its samples by rank.*plain dataset",
        ),
        (
            DataLoader(
                Noisy(),
                batch_sampler=torch.utils.data.BatchSampler(DistributedSampler(Noisy(), 2, 0), 2, False),
            ),
            "DistributedSampler",
        ),
        (
            DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] * 12, 12)),
            "WeightedRandomSampler.*seed, epoch",
        ),
        (DataLoader(Noisy(), sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler.*Subset"),
        (DataLoader(Noisy(), sampler=RandomSampler(Noisy(), replacement=True)), "replacement"),
        (DataLoader(Noisy(), sampler=RandomSampler(Noisy(), num_samples=3)), "some of the samples"),
        (DataLoader(Noisy(), batch_sampler=Pairs()), "batch_sampler of its own"),
        (DataLoader(Noisy(), batch_size=None), "batch_size=None"),
        ({"train": [1], "test": [2]}, "'train', 'test'"),
        (iter([1, 2]), "read only once"),
        ([], "no samples"),
        ("data.csv", "is a str"),
        (3, "is a int"),
    ],
)
def test_data_that_cannot_be_kept_is_refused(data: Any, message: str) -> None:
    """Data that orders, splits or hides its samples is refused with the way out."""
    with pytest.raises(DataError, match=message):
        MicrobatchLoader(data, seed=0)


def test_inspection_speaks_of_random_draws_and_of_state_in_the_dataset() -> None:
    """Draws from the global states are named with their libraries, hidden generators are found."""

    class Hidden(Noisy):
        generator = np.random.default_rng(0)

        def __getitem__(self, index: int) -> Any:
            return self.generator.random()

    class OnlyNumpy(Noisy):
        def __getitem__(self, index: int) -> Any:
            return np.random.rand()

    before = random_state()
    assert "python and numpy and torch" in inspect_data(Noisy())[0]
    assert "state of numpy;" in inspect_data(OnlyNumpy())[0]
    assert "same seed" in inspect_data(Hidden())[0]
    assert before.moved(random_state()) == []


@pytest.mark.parametrize(
    "value", [float("nan"), torch.tensor(torch.nan), np.array([np.nan]), {"a": (1, object())}]
)
def test_inspection_is_silent_about_plain_data(value: Any) -> None:
    """NaN and objects without a value of their own are no cause for a warning."""

    class Plain(Noisy):
        def __getitem__(self, index: int) -> Any:
            return value

    assert inspect_data(Plain()) == []
    assert inspect_data(TensorDataset(torch.ones(3))) == []


def test_inspection_speaks_of_loaders_and_streams() -> None:
    """Another batch size, a distributed sampler and a stream that asks for its rank are told."""

    class ByRank(Items):
        def __iter__(self) -> Any:
            return iter(range(torch.distributed.get_rank(), 24, torch.distributed.get_world_size()))

    quiet: DataLoader[Any] = DataLoader(Noisy(), batch_size=2)
    assert len(inspect_data(quiet, batch_size=2)) == len(inspect_data(quiet)) == 1
    assert "batch_size=2, the job batch_size=4" in inspect_data(quiet, batch_size=4)[0]
    by_rank: DataLoader[Any] = DataLoader(Noisy(), sampler=DistributedSampler(Noisy(), 2, 0))
    assert "splits its samples" in inspect_data(by_rank)[0]
    assert "split itself by rank" in inspect_data(ByRank())[0]
    assert inspect_data(Items(splits=True)) == []
