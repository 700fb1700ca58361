"""Reported faults of loss scale and gradient averaging (shared/reports.md, part A)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwise import train
from meshwise.events import RunStarted
from meshwise.launch.local import run_ranks
from meshwise.session import Session
from scenarios import (
    MIXES,
    Scale,
    check_layouts,
    column,
    make_job,
    mean_squares,
    near,
    random_rows,
    sgd,
    squares,
    train_in_memory,
)


def two_scales(value: float) -> nn.Module:
    """One weight to train in front of one that is fixed at 1: two units."""
    return nn.Sequential(Scale(value), Scale(1.0, trainable=False))


def pairs(*numbers: float) -> TensorDataset:
    x = column(*numbers)
    return TensorDataset(x, torch.zeros_like(x))


@pytest.mark.parametrize("size", [1, 2, [3, 1]])
def test_a_summed_loss_is_not_divided_by_anything(size: Any) -> None:
    """The gradient of a summed loss is that of the whole batch under every layout (B001)."""
    job = make_job(
        lambda: two_scales(0.5), pairs(1, 2, 3, 4), loss=squares, batch_size=4, microbatch_size=size
    )
    layouts = [n for n in MIXES if size == 1 or "dp=3" not in n]
    one = check_layouts(job, layouts, steps=1)
    assert one.grads["0.w"] == near(30.0)
    assert one.params["0.w"] == near(0.2)


@pytest.mark.parametrize(
    ("size", "layouts"), [([3, 2], ["dp=2", "pp=2", "dp=2,pp=2"]), (2, MIXES), (1, MIXES)]
)
def test_each_sample_weighs_the_same_on_uneven_slices(size: Any, layouts: list[str]) -> None:
    """A mean over slices of 3 and 2 (or 2, 2 and 1) samples is the mean over the 5 samples (B002)."""
    job = make_job(lambda: two_scales(1.0), pairs(1, 2, 3, 4, 5), batch_size=5, microbatch_size=size)
    one = check_layouts(job, layouts, steps=1)
    assert one.grads["0.w"] == near(22.0)
    assert one.params["0.w"] == near(0.78)


def masked_squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output.squeeze(-1) ** 2 * batch["mask"]).sum() / batch["mask"].sum()


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Three samples of 2, 3 and 5 valid tokens of value 1, 2 and 3."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        valid = (2, 3, 5)[i]
        mask = (torch.arange(5) < valid).double()
        return {"x": torch.full((5, 1), i + 1.0, dtype=torch.float64), "mask": mask}


class TokenScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(1.0), Scale(1.0, trainable=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("weight", [None, lambda batch: batch["mask"].sum()], ids=["found", "given"])
def test_microbatches_weigh_by_their_valid_tokens(weight: Any) -> None:
    """Accumulating over microbatches with 2, 3 and 5 valid tokens is the big batch (B004)."""
    job = make_job(TokenScale, Tokens(), loss=masked_squares, weight=weight, batch_size=3, microbatch_size=1)
    assert check_layouts(job, MIXES, steps=1).grads["first.w"] == near(11.8)


def test_ignored_targets_do_not_weigh() -> None:
    """Cross-entropy with ignored targets is the mean over the valid ones of the whole batch (B004)."""
    labels = torch.tensor([[0, 1, -100, -100], [2, -100, -100, -100], [0, 1, 2, 1], [1, 1, 0, -100]] * 2)
    data = TensorDataset(random_rows(8, 4, 3), labels)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    job = make_job(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(),
        data,
        loss=loss,
        batch_size=8,
        microbatch_size=[3, 2, 3],
    )
    check_layouts(job, MIXES)


class LateMask(Tokens):
    """Tokens that are all valid in the samples a first look sees, and in no later ones."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        mask = (torch.arange(5) < (5 if i < 8 else 1 + i % 5)).double()
        return {"x": torch.full((5, 1), i + 1.0, dtype=torch.float64), "mask": mask}


def test_a_mask_counts_even_where_the_first_samples_hide_it() -> None:
    """A loss over a mask is the big batch's even if the first samples are all valid (B004)."""
    job = make_job(TokenScale, LateMask(), loss=masked_squares, batch_size=8, microbatch_size=2)
    check_layouts(job, MIXES, steps=2)


@pytest.mark.parametrize("positive", [0.0, 5.0])
def test_class_weights_count_even_where_the_first_samples_hide_them(positive: float) -> None:
    """A cross-entropy with class weights is the big batch's even if one class comes first (B004)."""
    labels = torch.tensor([0] * 8 + [1, 0, 1, 1, 0, 1, 0, 1])
    weights = torch.tensor([1.0, positive], dtype=torch.float64)
    job = make_job(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(),
        TensorDataset(random_rows(16, 3), labels),
        loss=nn.CrossEntropyLoss(weight=weights),
        batch_size=8,
        microbatch_size=2,
    )
    check_layouts(job, MIXES, steps=2)


def contrast(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    a, b = output
    return F.cross_entropy(a @ b.T, torch.arange(len(a)))


def both_sides(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]), model(batch[1])


@pytest.mark.parametrize("start", ["zero", "random"])
def test_a_contrastive_loss_sees_all_negatives(start: str) -> None:
    """An in-batch contrastive loss is taken over the whole batch, with gradients through all of it (B007)."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
        for parameter in model.parameters():
            if start == "zero":
                nn.init.zeros_(parameter)
        return model

    data = TensorDataset(random_rows(8, 6), random_rows(8, 6, seed=1))
    for size in (4, 2, [3, 5]):
        job = make_job(build, data, loss=contrast, forward=both_sides, batch_size=8, microbatch_size=size)
        layouts = MIXES if size == 2 else [n for n in MIXES if "dp=3" not in n]
        one = check_layouts(job, layouts, steps=2)
        if start == "zero":
            assert one.losses[0] == near(math.log(8))


def test_the_batch_size_is_the_global_one() -> None:
    """24 samples in batches of 6 are 4 steps with the same losses on any number of devices (B008)."""
    job = make_job(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
        TensorDataset(random_rows(24, 3), random_rows(24, 1, seed=1)),
        batch_size=6,
        microbatch_size=1,
        shuffle=True,
    )
    one = None
    for layout in ("dp=1", "dp=2", "dp=3", "dp=2,pp=2"):
        workers_batches = len(list(train_in_memory(job, layout, 0).workers[0].batches(0)))
        assert workers_batches == 4
        run = train_in_memory(job, layout, 4)
        one = one or run
        assert run.losses == one.losses


def test_the_report_names_the_global_batch(tmp_path: Any) -> None:
    """A run on 2 devices reports 6 samples for all devices together, and 4 steps an epoch (B008)."""
    job = make_job(
        lambda: nn.Linear(3, 1).double(),
        TensorDataset(random_rows(24, 3), random_rows(24, 1, seed=1)),
        batch_size=6,
        microbatch_size=1,
    )
    events: list[Any] = []
    result = train(job, devices=2, run=tmp_path / "run", progress=False, listeners=[events.append])
    started = next(e for e in events if isinstance(e, RunStarted))
    assert result.num_steps == 4
    assert "a step is 6 samples on all devices together" in started.notes[0]
    assert "4 steps an epoch" in started.notes[0]


def test_real_ranks_average_as_one_device_does() -> None:
    """Two and three processes end with the summed and the uneven gradient of the whole batch (B001, B002)."""

    def rank(context: Any) -> Any:
        found = []
        for loss, start, numbers in ((squares, 0.5, (1, 2, 3, 4)), (mean_squares, 1.0, (1, 2, 3, 4, 5))):
            x = column(*numbers)
            job = make_job(
                lambda start=start: Scale(start),
                TensorDataset(x, torch.zeros_like(x)),
                loss=loss,
                optimizer=sgd(0.01),
                batch_size=len(x),
                microbatch_size=2 if len(x) == 5 else 1,
            )
            with Session(job, f"dp={context.world_size}", device=context.device) as session:
                for batch in session.batches(1):
                    session.step(batch)
                found.append((float(session.model.w.grad), float(session.model.w.detach())))
        return found

    results = run_ranks(rank, 2, device="cpu", timeout=60) + run_ranks(rank, 3, device="cpu", timeout=60)
    assert all(r == results[0] for r in results)
    assert results[0] == [near((30.0, 0.2)), near((22.0, 0.78))]
