"""The order of samples, and keyed fetching."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from meshwise.data.fetch import preserved_random_state, random_state, seed_random_state
from meshwise.data.loader import MicrobatchLoader
from meshwise.data.order import Position, epoch_order, locate, mix, num_steps, sample_key, step_ids
from meshwise.errors import DataError
from noisy import Noisy, NoisyBatches, QuietBatches, same

SIZES = [1, 2, 3, 7, 12]
BATCHES = [1, 2, 3, 4, 12, 13]
ORDER_8_0_0 = [5, 2, 0, 4, 6, 1, 3, 7]
MIX_1_2_3 = 1355775664812041193


# Order


@pytest.mark.parametrize("num_samples", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("shuffle", [False, True])
def test_order_is_a_permutation_of_plain_ints(num_samples: int, shuffle: bool) -> None:
    """Every id comes once, as a python int, in any epoch."""
    for seed, epoch in itertools.product(range(3), range(3)):
        order = epoch_order(num_samples, seed, epoch, shuffle)
        assert sorted(order) == list(range(num_samples))
        assert all(type(index) is int for index in order)


def test_order_is_a_function_of_seed_and_epoch_alone() -> None:
    """Orders repeat, differ between seeds and epochs, and leave the global state alone."""
    before = random_state()
    orders = {(s, e): list(epoch_order(50, s, e, True)) for s in range(4) for e in range(4)}
    assert orders == {(s, e): list(epoch_order(50, s, e, True)) for s in range(4) for e in range(4)}
    assert len({tuple(order) for order in orders.values()}) == 16
    assert before.moved(random_state()) == []


def test_order_never_changes_between_versions() -> None:
    """The order of a known seed and epoch is part of what a run means."""
    assert list(epoch_order(8, 0, 0, True)) == ORDER_8_0_0
    assert mix(1, 2, 3) == MIX_1_2_3


def test_orders_are_uniform() -> None:
    """All 24 orders of 4 samples come about equally often over seeds and epochs."""
    counts = collections.Counter(tuple(epoch_order(4, s, e, True)) for s in range(60) for e in range(40))
    assert len(counts) == 24
    assert min(counts.values()) > 60 and max(counts.values()) < 145


def test_mix_keys_are_distinct_and_in_range() -> None:
    """Keys of small, negative, long and reordered integers never meet."""
    values = [-1, 0, 1, 2, 2**31, 2**63 - 1]
    keys = [mix(*ints) for n in range(4) for ints in itertools.product(values, repeat=n)]
    keys += [sample_key(s, e, i) for s in range(10) for e in range(10) for i in range(100)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_and_positions_agree(drop_last: bool) -> None:
    """Walking step by step over three epochs gives the position that locate finds from the count alone."""
    for num_samples, batch_size in itertools.product(SIZES, BATCHES):
        steps, trained = num_steps(num_samples, batch_size, drop_last), 0
        for epoch in range(3 if steps else 0):
            order = epoch_order(num_samples, 5, epoch, True)
            seen: list[int] = []
            for step in range(steps):
                found = locate(trained, num_samples=num_samples, batch_size=batch_size, drop_last=drop_last)
                assert found == Position(epoch=epoch, step=step)
                ids = step_ids(order, step, batch_size)
                seen += ids
                trained += len(ids)
            assert seen == list(order)[: len(seen)]
            assert len(seen) == (num_samples // batch_size * batch_size if drop_last else num_samples)


def test_a_position_inside_a_step_is_refused() -> None:
    """A count reached with another batch size is no start of a step, and the message has the numbers."""
    with pytest.raises(DataError, match=r"6 samples.*batch_size=4"):
        locate(6, num_samples=10, batch_size=4)
    with pytest.raises(DataError, match="drop_last leaves no step"):
        locate(0, num_samples=3, batch_size=4, drop_last=True)
    with pytest.raises(DataError, match="batch_size >= 1"):
        num_steps(3, 0)


def test_order_does_not_import_torch() -> None:
    """Planning may ask for orders without torch."""
    code = "import sys, meshwise.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# Keyed fetching


def test_noise_depends_on_the_sample_alone() -> None:
    """A sample has the same noise in any microbatch, at any place, after anything (B066)."""
    alone = {i: MicrobatchLoader(Noisy(), seed=3).fetch(1, [i])["noise"][0] for i in range(12)}
    loader = MicrobatchLoader(Noisy(), seed=3)
    for size in (1, 2, 3, 5, 12):
        for start in range(0, 12, size):
            ids = list(range(12))[::-1][start : start + size]
            torch.manual_seed(size)
            batch = loader.fetch(1, ids)
            assert batch["id"].tolist() == ids
            assert all(torch.equal(row, alone[i]) for i, row in zip(ids, batch["noise"], strict=True))


def test_draws_are_distinct_over_samples_epochs_seeds_and_libraries() -> None:
    """No random number comes twice in a run (B066)."""
    draws = [
        value
        for seed, epoch in itertools.product(range(2), range(2))
        for value in MicrobatchLoader(Noisy(), seed=seed).fetch(epoch, range(12))["noise"].flatten().tolist()
    ]
    assert len(set(draws)) == len(draws) == 2 * 2 * 12 * 3


@pytest.mark.parametrize("data", [Noisy(), NoisyBatches(), Subset(Noisy(), range(12)), list(range(12))])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_states_are_left_alone(data: Any, num_workers: int) -> None:
    """Fetching draws nothing from the states of the training process."""
    loader = MicrobatchLoader(data, seed=0, num_workers=num_workers)
    before = random_state()
    loader.fetch(0, [1, 2])
    assert len(list(loader.stream(0, [(0, [0, 1]), (1, [2])]))) == 2
    assert before.moved(random_state()) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on errors came with Python 3.11")
def test_states_are_put_back_after_an_error_which_names_the_sample() -> None:
    """The dataset's own error comes through with the sample, the epoch and the dataset in a note."""
    loader, before = MicrobatchLoader(Noisy(3), seed=0), random_state()
    with pytest.raises(IndexError) as caught:
        loader.fetch(4, [1, 99])
    assert caught.value.__notes__ == ["meshwise: while fetching sample 99 of Noisy in epoch 4"]
    assert before.moved(random_state()) == []


def test_states_seeded_from_one_key_are_not_one_stream() -> None:
    """numpy and torch run one algorithm on 32 bits of seed, so they must get different bits."""
    with preserved_random_state():
        seed_random_state(123456789)
        numpy_state: Any = np.random.get_state()
        assert int(numpy_state[1][0]) != torch.initial_seed() & 0xFFFFFFFF


@pytest.mark.parametrize("kind", ["own", "subset", "stack"])
def test_batch_access_that_draws_gives_the_noise_of_single_samples(kind: str) -> None:
    """A dataset with __getitems__ has the same keyed noise as one without."""
    wrap: Any = {
        "own": lambda d: d,
        "subset": lambda d: Subset(d, range(12)),
        "stack": lambda d: StackDataset(x=d),
    }
    batched = MicrobatchLoader(wrap[kind](NoisyBatches()), seed=1)
    single = MicrobatchLoader(wrap[kind](Noisy()), seed=1)
    ids = [5, 0, 11]
    assert same(batched.fetch(2, ids), single.fetch(2, ids))
    noise: Any = single.fetch(2, [0])
    assert torch.equal((noise["x"] if kind == "stack" else noise)["noise"][0], single_noise(1, 2, 0))


def single_noise(seed: int, epoch: int, index: int) -> torch.Tensor:
    """Give the noise of one sample of Noisy."""
    row: torch.Tensor = MicrobatchLoader(Noisy(), seed=seed).fetch(epoch, [index])["noise"][0]
    return row


def test_batch_access_without_draws_is_used_once() -> None:
    """A quiet dataset with __getitems__ is asked once for a whole microbatch."""
    data = QuietBatches()
    assert MicrobatchLoader(data, seed=0).fetch(0, [3, 1])["id"].tolist() == [3, 1]
    assert data.calls == 1


def tensor_data() -> list[Any]:
    """Give datasets of the same twelve rows, most with a shortcut."""
    x, y = torch.arange(24.0).reshape(2, 12).t(), torch.arange(12)
    plain = TensorDataset(x, y)
    return [
        plain,
        Subset(plain, list(range(12))),
        Subset(Subset(plain, list(range(11, -1, -1))), list(range(11, -1, -1))),
        ConcatDataset([Subset(plain, range(5)), Subset(plain, range(5, 12))]),
        StackDataset(Subset(x, range(12)), Subset(y, range(12))),  # type: ignore[arg-type]
        list(zip(x, y, strict=True)),
        tuple(zip(x, y, strict=True)),
    ]


@pytest.mark.parametrize("place", range(7))
def test_shortcuts_give_what_default_collate_gives(place: int) -> None:
    """A TensorDataset, parts of it and lists give the batch of a plain DataLoader, in memory of its own."""
    data = tensor_data()[place]
    ids = [7, 0, 3]
    got = MicrobatchLoader(data, seed=0).fetch(0, ids)
    assert same(got, default_collate([data[i] for i in ids]))
    for tensor in got:
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


def test_a_users_collate_result_is_copied_into_memory_of_its_own() -> None:
    """Views of the data that a collate function returns become tensors of the batch's own."""
    Pair = collections.namedtuple("Pair", "a b")
    rows = torch.arange(64.0).reshape(8, 8)

    def collate(samples: list[Any]) -> Any:
        return {"view": rows[1:3, 1:].t(), "pair": Pair(rows[0], "text"), "list": [rows[1], (rows[2], None)]}

    batch = MicrobatchLoader(list(rows), seed=0, collate_fn=collate).fetch(0, [0])
    assert isinstance(batch["pair"], Pair) and batch["pair"].b == "text" and batch["list"][1][1] is None
    tensors = [batch["view"], batch["pair"].a, batch["list"][0], batch["list"][1][0]]
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        tensor.zero_()
    assert torch.equal(rows, torch.arange(64.0).reshape(8, 8))


def noisy_collate(samples: list[Any]) -> Any:
    """Mask like a language-model collator: draws for the whole microbatch."""
    return {**default_collate(samples), "mask": torch.rand(len(samples)), "extra": random.random()}


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("data", "collate_fn"),
    [
        (Noisy(), None),
        (Noisy(), noisy_collate),
        (NoisyBatches(), noisy_collate),
        (TensorDataset(torch.arange(12.0)), None),
        (list(range(12)), None),
    ],
)
def test_workers_do_not_change_a_value(num_workers: int, data: Any, collate_fn: Any) -> None:
    """With any number of worker processes the microbatches, tags and order are those of none (B066)."""
    plan = [(tag, [tag, (5 * tag + 1) % 12]) for tag in range(7)]
    here = list(MicrobatchLoader(data, seed=9, collate_fn=collate_fn).stream(3, plan))
    loader = MicrobatchLoader(data, seed=9, collate_fn=collate_fn, num_workers=num_workers)
    assert [tag for tag, _ in here] == list(range(7))
    assert same(here, list(loader.stream(3, plan)))


def run_ids_and_noise(loader: MicrobatchLoader, start: int, ranks: int) -> list[Any]:
    """Run to the end of epoch 2 from a sample count, each rank taking its part of each step."""
    found: list[Any] = []
    while True:
        place = locate(start, num_samples=12, batch_size=3)
        if place.epoch == 3:
            return found
        order = epoch_order(12, 7, place.epoch, True)
        steps = [step_ids(order, step, 3) for step in range(place.step, 4)]
        parts = [
            [(t, ids[rank::ranks]) for t, ids in enumerate(steps) if ids[rank::ranks]]
            for rank in range(ranks)
        ]
        batches = [batch for part in parts for _, batch in loader.stream(place.epoch, part)]
        rows = {int(i): row for batch in batches for i, row in zip(batch["id"], batch["noise"], strict=True)}
        found += [(place.epoch, i, rows[i].tolist()) for ids in steps for i in ids]
        start += sum(map(len, steps))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("trained", [12, 24 + 9, 12 + 6, 0])
def test_a_resumed_run_sees_the_ids_and_noise_of_the_unbroken_one(num_workers: int, trained: int) -> None:
    """From inside and at the end of an epoch, ids and noise go on as if nothing had happened (B071)."""
    unbroken = run_ids_and_noise(MicrobatchLoader(Noisy(), seed=7), 0, ranks=1)
    resumed = run_ids_and_noise(MicrobatchLoader(Noisy(), seed=7, num_workers=num_workers), trained, ranks=2)
    assert resumed == unbroken[trained:]


def test_plans_are_read_lazily_and_workers_end_with_the_iterator() -> None:
    """An endless plan streams, and dropping the iterator ends its worker processes."""
    loader = MicrobatchLoader(Noisy(), seed=0, num_workers=2)
    stream = loader.stream(0, ((tag, [tag % 12]) for tag in itertools.count()))
    assert [next(stream)[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    del stream
    for worker in workers:
        worker.join(timeout=30)
        assert not worker.is_alive()


def test_persistent_workers_serve_stream_after_stream() -> None:
    """persistent_workers of a DataLoader is kept, also when a stream is left before its end."""
    loader = MicrobatchLoader(DataLoader(Noisy(), num_workers=1, persistent_workers=True), seed=2)
    plain = MicrobatchLoader(Noisy(), seed=2)
    plan = [(tag, [tag]) for tag in range(4)]
    pids = set()
    for epoch in range(3):
        stream = loader.stream(epoch, plan)
        pids |= {worker.pid for worker in multiprocessing.active_children()}
        if epoch == 1:
            next(stream)
            continue
        assert same(list(stream), list(plain.stream(epoch, plan)))
    assert len(pids) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on errors came with Python 3.11")
def test_an_error_in_a_worker_names_the_sample() -> None:
    """The dataset's error in a worker process arrives with its type and the note, and the worker is gone."""
    loader = MicrobatchLoader(Noisy(3), seed=0, num_workers=1)
    with pytest.raises(IndexError, match="while fetching sample 99 of Noisy in epoch 0"):
        list(loader.stream(0, [(0, [0]), (1, [99])]))
    assert multiprocessing.active_children() == []
