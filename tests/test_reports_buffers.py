"""Reported faults of buffers and batch norm (shared/reports.md, part F)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwise.launch.local import run_ranks
from meshwise.session import Session
from scenarios import (
    MIXES,
    Scale,
    adamw,
    assert_same_bits,
    check_layouts,
    column,
    make_job,
    near,
    random_rows,
    train_in_memory,
)


class Judge(nn.Module):
    """Linear, batch norm, Linear, and a plain buffer that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("gain", torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x) * self.gain)))


def test_a_model_with_buffers_may_be_called_twice_before_one_backward() -> None:
    """A discriminator judges real and fake samples in one step, one backward (B041)."""
    job = make_job(
        Judge,
        TensorDataset(random_rows(18, 3), random_rows(18, 3, seed=1) + 1),
        loss=lambda output, batch: output[0].mean() - output[1].mean(),
        forward=lambda model, batch: (model(batch[0]), model(batch[1])),
        optimizer=adamw(),
        batch_size=6,
        microbatch_size=2,
    )
    check_layouts(job, MIXES)


class Counter(nn.Module):
    """Add a buffer to the output, and bind it anew to one more."""

    def __init__(self, ranks: bool = False) -> None:
        super().__init__()
        self.layer, self.last, self.ranks = Scale(1.0), Scale(1.0), ranks
        self.register_buffer("b", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) + self.b
        self.b = self.b + 1 + (dist.get_rank() if self.ranks else 0)
        return self.last(out)


def counter_job(**fields: Any) -> Any:
    x = column(*range(1, 19)) / 10
    return make_job(Counter, TensorDataset(x, x), batch_size=6, microbatch_size=2, **fields)


def test_a_buffer_that_the_forward_binds_anew_counts_steps() -> None:
    """A buffer bound to one more by each forward is 3 after 3 steps (B042)."""
    one = check_layouts(counter_job(), MIXES, steps=3)
    assert one.buffers["b"].tolist() == [3.0]


def test_a_buffer_that_depends_on_the_rank_stays_the_same_on_all() -> None:
    """Where code adds its rank to a buffer, all ranks see and save one value: the last replica's (B042)."""
    job = make_job(lambda: Counter(ranks=True), counter_job().train_data, batch_size=6, microbatch_size=2)

    def rank(context: Any) -> Any:
        seen = []
        with Session(job, "dp=2", device=context.device) as session:
            for batch in session.batches(1):
                seen.append(session.model.b.item())
                session.step(batch)
            state = session.state()
            return seen, session.model.b.item(), None if state is None else state.tensors["b"].item()

    first, second = run_ranks(rank, 2, device="cpu", timeout=60)
    assert first[:2] == second[:2] == ([0.0, 2.0, 4.0], 6.0)
    assert first[2] == 6.0


@pytest.mark.parametrize(
    ("numbers", "sizes", "mean", "var"),
    [((1, 2, 3, 4, 5), [3, 2], 0.3, 1.15), ((1, 3), [1, 1], 0.2, 1.1), ((1, 2, 3, 4, 5), 1, 0.3, 1.15)],
)
def test_batch_norm_is_that_of_the_global_batch(numbers: Any, sizes: Any, mean: float, var: float) -> None:
    """Uneven slices, and one sample a rank, give the running values of one device (B043)."""
    x = column(*numbers)
    job = make_job(
        lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double(),
        TensorDataset(x, x),
        batch_size=len(numbers),
        microbatch_size=sizes,
    )
    layouts = MIXES if sizes == 1 else [n for n in MIXES if "dp=3" not in n and "pp" not in n]
    one = check_layouts(job, layouts, steps=1)
    assert one.buffers["0.running_mean"].tolist() == [near(mean)]
    assert one.buffers["0.running_var"].tolist() == [near(var)]
    check_layouts(job, layouts, steps=3)


class Kinds(nn.Module):
    """Hold a mask, a counter, a table of bytes and weights of two half precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.low = nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.brain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.table = self.table + 1
        hidden = self.layer(x) * self.mask * self.low.float() + self.table.float()
        return self.last(torch.tanh(hidden) * self.brain.float())


def kinds_job() -> Any:
    data = TensorDataset(random_rows(12, 4).float(), random_rows(12, 1, seed=1).float())
    return make_job(Kinds, data, batch_size=6, microbatch_size=2)


def test_any_dtype_of_buffers_and_weights_trains() -> None:
    """Bool, int and byte buffers, float16 and bfloat16 weights keep dtype and bits everywhere (B046)."""
    one = train_in_memory(kinds_job(), "dp=1")
    assert one.buffers["count"].item() == 3
    assert one.buffers["table"].tolist() == [3, 4, 5, 6]
    assert one.params["low"].dtype == torch.float16
    for layout in MIXES:
        assert_same_bits(train_in_memory(kinds_job(), layout), one)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_any_dtype_travels_between_processes(layout: str, tmp_path: Any) -> None:
    """Two processes train, gather, save and load buffers and weights of any dtype (B046)."""

    def rank(context: Any) -> Any:
        with Session(kinds_job(), layout, device=context.device) as session:
            for batch in session.batches(1):
                session.step(batch)
            session.save(tmp_path / "saved")
            session.load(tmp_path / "saved")
            return session.state()

    state = run_ranks(rank, 2, device="cpu", timeout=60)[0]
    expected = train_in_memory(kinds_job(), "dp=1", 2)
    for name, tensor in {**expected.params, **expected.buffers}.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor)
