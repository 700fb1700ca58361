"""Reported faults of special parameters (shared/reports.md, part G)."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from meshwise.launch.local import run_ranks
from meshwise.runtime.state import gather_state
from meshwise.runtime.worker import drive_together
from meshwise.session import Session
from scenarios import (
    MIXES,
    REPLICAS,
    adamw,
    check_layouts,
    make_job,
    random_rows,
    sgd,
    train_in_memory,
)

# ---- B048: sparse gradients ------------------------------------------------------------------------------


class Tables(nn.Module):
    """Two sparse tables, of which the second is never used."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.used = nn.Embedding(5, 2, padding_idx=0, sparse=True)
        self.unused = nn.Embedding(5, 2, padding_idx=0, sparse=True)
        self.last = nn.Linear(2, 1).requires_grad_(dense)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.used(ids))


def test_sparse_gradients_add_up_over_replicas() -> None:
    """A sparse table whose ids are all padding on one rank trains as in a plain loop (B048)."""
    data = TensorDataset(torch.tensor([0, 0, 1, 1]), torch.zeros(4, 1, dtype=torch.float64))
    for size in (1, 2):
        job = make_job(
            Tables,
            data,
            optimizer=lambda params: torch.optim.SparseAdam(list(params), lr=0.1),
            batch_size=4,
            microbatch_size=size,
        )
        start = train_in_memory(job, "dp=1", 0).params
        layouts = MIXES if size == 1 else [n for n in MIXES if "dp=3" not in n]
        one = check_layouts(job, layouts, steps=3)
        moved = (one.params["used.weight"] != start["used.weight"]).any(1)
        assert moved.tolist() == [False, True, False, False, False]
        assert torch.equal(one.params["unused.weight"], start["unused.weight"])


def test_repeated_ids_and_dense_weights_beside_a_sparse_table_train() -> None:
    """A sparse table with ids repeated in and between microbatches trains beside dense weights (B048)."""
    ids = torch.tensor([1, 1, 2, 0, 3, 1, 2, 2, 4, 0, 1, 4, 3, 3, 3, 2, 1, 0])
    job = make_job(
        lambda: Tables(dense=True),
        TensorDataset(ids, random_rows(18, 1)),
        optimizer=sgd(0.1),
        batch_size=6,
        microbatch_size=2,
    )
    check_layouts(job, MIXES)


def test_real_ranks_exchange_sparse_gradients() -> None:
    """Two processes sum sparse gradients, of which one is empty, to those of one device (B048)."""
    data = TensorDataset(torch.tensor([0, 0, 1, 1]), torch.zeros(4, 1, dtype=torch.float64))
    job = make_job(
        Tables,
        data,
        optimizer=lambda params: torch.optim.SparseAdam(list(params), lr=0.1),
        batch_size=4,
        microbatch_size=2,
    )

    def rank(context: Any) -> Any:
        with Session(job, "dp=2", device=context.device) as session:
            for batch in session.batches(2):
                session.step(batch)
            return session.model.used.weight.tolist()

    expected = train_in_memory(job, "dp=1", 2).params["used.weight"].tolist()
    assert run_ranks(rank, 2, device="cpu", timeout=60) == [expected] * 2


# ---- B049: a parameter without dims -----------------------------------------------------------------------


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.t = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.exp(self.t)


def temperature_job() -> Any:
    data = TensorDataset(random_rows(18, 4), random_rows(18, 4, seed=1))
    return make_job(Temperature, data, optimizer=adamw(), batch_size=6, microbatch_size=2)


def test_a_parameter_without_dims_trains() -> None:
    """A temperature of shape () trains under every layout as on one device (B049)."""
    one = check_layouts(temperature_job(), MIXES, steps=3)
    assert one.params["t"].shape == ()


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_a_parameter_without_dims_is_saved_and_loaded(layout: str, tmp_path: Any) -> None:
    """A temperature that two processes save is the same, of shape (), where one loads it (B049)."""

    def rank(context: Any) -> None:
        with Session(temperature_job(), layout, device=context.device) as session:
            for batch in session.batches(1):
                session.step(batch)
            session.save(tmp_path / "saved")

    run_ranks(rank, 2, device="cpu", timeout=60)
    expected = train_in_memory(temperature_job(), "dp=1", 3).params["t"]
    with Session(temperature_job(), "dp=1", devices=1) as session:
        session.load(tmp_path / "saved")
        t = session.model.t.detach()
    assert t.shape == ()
    assert torch.equal(t, expected)


# ---- B051: re-parametrised modules ------------------------------------------------------------------------


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.Linear(3, 4).double())
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 1).double())
    model(random_rows(2, 3))
    return model


def new_weight_norm() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(3, 4).double())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 1).double())


class Spectral(nn.Module):
    """A layer under spectral norm, run twice in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(3, 3).double())
        self.last = nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


BUILDERS = {"old": old_weight_norm, "new": new_weight_norm, "spectral": Spectral}


def norm_job(kind: str) -> Any:
    data = TensorDataset(random_rows(18, 3), random_rows(18, 1, seed=1))
    return make_job(BUILDERS[kind], data, optimizer=adamw(), batch_size=6, microbatch_size=2)


@pytest.mark.parametrize("kind", BUILDERS)
def test_weights_under_a_norm_train(kind: str) -> None:
    """Weight norm, old and new, and spectral norm run twice a step train as in a plain loop (B051)."""
    check_layouts(norm_job(kind), MIXES if kind != "old" else REPLICAS, steps=3)


@pytest.mark.parametrize("kind", BUILDERS)
def test_weights_under_a_norm_start_in_new_processes(kind: str) -> None:
    """A function that builds such a model starts in two processes, whose weights and vectors agree (B051)."""
    job = norm_job(kind)

    def rank(context: Any) -> Any:
        with Session(job, "dp=2", device=context.device) as session:
            for batch in session.batches(1):
                session.step(batch)
            return {n: t.tolist() for n, t in session.model.state_dict().items()}

    first, second = run_ranks(rank, 2, device="cpu", timeout=60)
    assert first == second
    expected = train_in_memory(job, "dp=1", 3)
    assert all(first[n] == p.tolist() for n, p in {**expected.params, **expected.buffers}.items())


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_model_instance_under_a_norm_travels_to_the_ranks(kind: str) -> None:
    """A model under a norm, run once before the launch, trains in two processes as in this one (B051)."""
    torch.manual_seed(0)
    model = BUILDERS[kind]()
    model(random_rows(2, 3))
    job = norm_job(kind).with_fields(model=model)

    def losses(layout: str) -> list[float]:
        with Session(job, layout) as session:
            return [session.step(batch).loss for batch in session.batches(1)]

    ranks = run_ranks(lambda _: losses("dp=2"), 2, device="cpu", timeout=60)
    assert ranks == [losses("dp=1")] * 2


# ---- B022, B023: frozen weights ------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen square layer with a low-rank adapter beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted_job(width: int, rank: int, blocks: int) -> Any:
    return make_job(
        lambda: nn.Sequential(*(Adapted(width, rank) for _ in range(blocks))).double(),
        TensorDataset(random_rows(18, width), random_rows(18, width, seed=1)),
        optimizer=adamw(0.05, weight_decay=0.1),
        batch_size=6,
        microbatch_size=2,
    )


def test_adapters_in_frozen_blocks_train_alone() -> None:
    """Low-rank adapters train as in a plain loop while the frozen weights keep their bits (B022)."""
    job = adapted_job(8, 2, 2)
    start = train_in_memory(job, "dp=1", 0).params
    one = check_layouts(job, MIXES, steps=5)
    frozen = [n for n in start if ".base." in n]
    assert len(frozen) == 4
    assert all(torch.equal(one.params[n], start[n]) for n in frozen)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "pp=2", "dp=2,pp=2"])
def test_only_trainable_weights_have_optimizer_state(layout: str) -> None:
    """A checkpoint of an adapter run holds optimizer state for the adapters alone (B022)."""
    run = train_in_memory(adapted_job(8, 2, 2), layout, 2)
    whole = drive_together([gather_state(w) for w in run.workers])[0]
    assert sorted(whole.optimizer) == sorted(n for n in run.params if ".base." not in n)


@pytest.mark.parametrize("layout", ["dp=2", "dp=3", "dp=2,pp=2"])
def test_frozen_weights_have_no_storage_for_gradients_or_moments(layout: str) -> None:
    """Gradients, moments and exchange buffers of a rank hold only the adapters' bytes (B023)."""
    run = train_in_memory(adapted_job(128, 4, 2), layout, 1)
    moments: Counter[int] = Counter()  # by stage: replicas hold a share each
    trainable = {}
    for worker in run.workers:
        engine, stage = worker.engine, worker.engine.pp_index
        mine = [p for n, p in worker.model.named_parameters() if n in worker.held and p.requires_grad]
        trainable[stage] = sum(p.numel() for p in mine)
        assert engine.optimizer is not None
        states = engine.optimizer.state.values()
        moments[stage] += sum(t.numel() for s in states for t in s.values() if t.numel() > 1)
        assert sum(p.grad.numel() for p in worker.model.parameters() if p.grad is not None) == trainable[stage]
        reducer = engine.gradients.reducer
        row = reducer.layout.num_bytes
        assert row <= 8 * (trainable[stage] + 64 * len(mine)) + 4096
        assert reducer.store.segment.num_bytes <= sum(map(len, reducer.covers)) * row * 2 + 4096
    assert all(2 * n <= moments[stage] <= 2 * (n + 16 * len(run.params)) for stage, n in trainable.items())
