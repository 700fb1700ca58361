"""Reported faults of the step itself: losses that are not finite, and schedules of the rate (part H)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from meshwise.errors import NonFiniteError
from meshwise.launch.local import run_ranks
from meshwise.session import Session
from scenarios import (
    CPU,
    MIXES,
    adamw,
    assert_close,
    assert_same_bits,
    check_layouts,
    make_job,
    near,
    random_rows,
    sgd,
    train_in_memory,
    train_plainly,
)

BATCH = 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def spoiled(sample: int, steps: int = 3) -> TensorDataset:
    """Make data of which one sample is NaN."""
    x, y = random_rows(BATCH * steps, 3), random_rows(BATCH * steps, 1, seed=1)
    x[sample] = float("nan")
    return TensorDataset(x, y)


def linear_rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=10)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("layout", MIXES)
def test_a_loss_that_is_nan_stops_every_rank(layout: str) -> None:
    """A NaN sample ends the run with its step, its rank and its number, and nothing updated (B055)."""
    job = make_job(plain_net, spoiled(13), batch_size=BATCH, microbatch_size=2)
    with pytest.raises(NonFiniteError) as caught:
        train_in_memory(job, layout, 3)
    message = str(caught.value)
    assert "step 1" in message
    assert re.search(r"samples \[.*\b13\b.*\]", message)
    expected_rank = {"dp=1": 0, "dp=2": 1, "pp=2": 1, "dp=2,pp=2": 3}.get(layout)
    assert expected_rank is None or f"rank {expected_rank} " in message


@pytest.mark.parametrize("build", [plain_net, net], ids=["plain", "batch norm"])
def test_a_step_with_nan_is_skipped_by_all(build: Any) -> None:
    """With on_nonfinite="skip" the parameters are those of a plain loop that leaves the step out (B055)."""
    data = spoiled(13)
    job = make_job(
        build,
        data,
        optimizer=adamw(0.05, weight_decay=0.1),
        scheduler=linear_rate,
        batch_size=BATCH,
        microbatch_size=2,
        on_nonfinite="skip",
    )
    one = train_in_memory(job, "dp=1", 3)
    assert [r.skipped for r in one.results] == [False, True, False]
    kept = [tuple(t[i * BATCH : (i + 1) * BATCH] for t in data.tensors) for i in (0, 2)]
    oracle = train_plainly(job, batches=kept)
    for name, expected in {**oracle.params, **oracle.buffers}.items():
        assert_close({**one.params, **one.buffers}[name], expected, name)
    for layout in MIXES:
        run = train_in_memory(job, layout, 3)
        assert [repr(x) for x in run.losses] == [repr(x) for x in one.losses]
        run.losses = one.losses
        assert_same_bits(run, one)


def test_a_skipped_step_leaves_dropout_and_data_in_place() -> None:
    """After a skipped step the random numbers and the samples of the next are the same everywhere (B055)."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

    job = make_job(
        build, spoiled(13, 4), batch_size=BATCH, microbatch_size=2, on_nonfinite="skip", shuffle=True
    )
    one = train_in_memory(job, "dp=1", 4)
    assert sum(r.skipped for r in one.results) == 1
    for layout in ("dp=2", "dp=3", "pp=2", "dp=2,pp=2"):
        run = train_in_memory(job, layout, 4)
        assert [r.ids for r in run.results] == [r.ids for r in one.results]
        assert all(torch.equal(run.params[n], one.params[n]) for n in one.params)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_real_ranks_stop_or_skip_together(layout: str) -> None:
    """Two processes skip the same step, and stop with the step and rank 1 where they are told to (B055)."""
    stop = make_job(plain_net, spoiled(13), batch_size=BATCH, microbatch_size=2)

    def rank(context: Any) -> Any:
        skip = stop.with_fields(on_nonfinite="skip")
        with Session(skip, layout, device=context.device) as session:
            skipped = [session.step(batch).skipped for batch in session.batches(1)]
        caught = ""
        with Session(stop, layout, device=context.device) as session:
            try:
                for batch in session.batches(1):
                    session.step(batch)
            except NonFiniteError as error:
                caught = str(error)
        return skipped, caught

    first, second = run_ranks(rank, 2, device="cpu", timeout=60)
    assert first == second
    assert first[0] == [False, True, False]
    assert first[1].startswith("step 1: the loss of microbatch 2 on rank 1 is nan")


def test_a_run_goes_on_where_it_was_after_a_skipped_step(tmp_path: Any) -> None:
    """A run that skipped a step, saved and loaded goes on with the next samples (B055)."""
    job = make_job(plain_net, spoiled(5), batch_size=BATCH, microbatch_size=2, on_nonfinite="skip")
    with Session(job, "dp=1", devices=1, device=CPU) as session:
        batches = session.batches(1)
        first = [session.step(next(batches)) for _ in range(2)]
        session.save(tmp_path / "saved")
    assert [r.skipped for r in first] == [True, False]
    with Session(job, "dp=1", devices=1, device=CPU) as session:
        session.load(tmp_path / "saved")
        rest = [session.step(batch).ids for batch in session.batches(1)]
    assert rest == [tuple(range(2 * BATCH, 3 * BATCH))]


def test_the_rate_follows_optimizer_steps() -> None:
    """A linear schedule over 10 steps stands at 0.6 after 4 steps on any devices (B058)."""
    data = TensorDataset(random_rows(32, 3), random_rows(32, 1, seed=1))
    job = make_job(
        plain_net, data, optimizer=sgd(1.0), scheduler=linear_rate, batch_size=BATCH, microbatch_size=2
    )
    check_layouts(job, MIXES, steps=4)
    for layout in MIXES:
        assert train_in_memory(job, layout, 4).lr == near(0.6)


def test_a_skipped_step_does_not_move_the_rate() -> None:
    """The rate counts the optimizer steps that were done, not those that were skipped (B058)."""
    job = make_job(
        plain_net,
        spoiled(13, 4),
        optimizer=sgd(1.0),
        scheduler=linear_rate,
        batch_size=BATCH,
        microbatch_size=2,
        on_nonfinite="skip",
    )
    for layout in ("dp=1", "dp=2", "dp=3", "pp=2"):
        assert train_in_memory(job, layout, 4).lr == near(0.7)
