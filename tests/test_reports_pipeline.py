"""Reported faults of pipelines: shapes, argument trees, schedules, clipping (shared/reports.md, part E)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from meshwise.errors import LayoutError
from meshwise.launch.local import run_ranks
from meshwise.layout import Layout
from meshwise.session import Session
from scenarios import (
    MIXES,
    REPLICAS,
    adamw,
    assert_same_bits,
    check_layouts,
    make_job,
    near,
    random_rows,
    sgd,
    train_in_memory,
)

# ---- B034: shapes that change --------------------------------------------------------------------------


def two_layers(inside: int = 3, outside: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 4), nn.Tanh(), nn.Linear(4, outside)).double()


def test_shapes_may_change_from_step_to_step() -> None:
    """Batches of 4 x 5, 4 x 3 and then 1 x 3 positions train one after another under a pipeline (B034)."""
    sizes = [(4, 5), (4, 3), (1, 3), (4, 5)]
    batches = [(random_rows(b, n, 3, seed=b + n), random_rows(b, n, 1, seed=9)) for b, n in sizes]
    data = TensorDataset(random_rows(4, 5, 3), random_rows(4, 5, 1))
    for size in (2, 1):
        job = make_job(two_layers, data, optimizer=adamw(), batch_size=4, microbatch_size=size)
        layouts = MIXES if size == 1 else [n for n in MIXES if "dp=3" not in n]
        check_layouts(job, layouts, batches=batches)


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*samples, strict=True)
    return pad_sequence(xs, batch_first=True), pad_sequence(ys, batch_first=True, padding_value=-100)


def test_each_microbatch_may_have_a_length_of_its_own() -> None:
    """Microbatches that the user pads to their own lengths add up to the batch padded as a whole (B034)."""
    lengths = [5, 2, 3, 7, 1, 4, 4, 4, 2, 6, 3, 3]
    samples = [(random_rows(n, 3, seed=i), torch.arange(n) % 4) for i, n in enumerate(lengths)]
    job = make_job(
        lambda: two_layers(outside=4),
        DataLoader(samples, collate_fn=pad),  # type: ignore[arg-type]
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        batch_size=6,
        microbatch_size=2,
    )
    check_layouts(job, MIXES)


# ---- B035: any argument tree -----------------------------------------------------------------------------


class Many(nn.Module):
    """Take None, flags, numbers and dicts; hand a dict with a None entry from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 1)
        self.double()

    def start(self, x: Tensor, mask: Tensor | None, scale: float) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x)) * scale
        return {"hidden": hidden if mask is None else hidden * mask.unsqueeze(-1), "aux": None}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        scale: float = 2.0,
        use_bias: bool = True,
        extra: dict[str, Tensor] | None = None,
    ) -> Tensor:
        state = self.start(x, mask, scale)
        hidden = state["hidden"] if state["aux"] is None else state["aux"]
        if extra is not None:
            hidden = hidden + self.table(extra["ids"])
        return F.linear(hidden, self.last.weight, self.last.bias if use_bias else None)


@pytest.mark.parametrize("with_mask", [True, False])
def test_any_tree_of_arguments_reaches_every_stage(with_mask: bool) -> None:
    """None, flags, numbers, dicts and keyword tensors go into the forward under every layout (B035)."""
    batches = []
    for step in range(4):
        batches.append(
            {
                "x": random_rows(6, 3, seed=step),
                "mask": (random_rows(6, seed=step) > 0).double() if with_mask else None,
                "scale": 1.0 + step % 2,
                "use_bias": step != 2,
                "extra": {"ids": torch.arange(6) % 5},
                "target": random_rows(6, 1, seed=20 + step),
            }
        )
    job = make_job(
        Many,
        [{k: v[0] if isinstance(v, Tensor) else 0 for k, v in batches[0].items() if k in ("x", "target")}]
        * 6,
        loss=lambda output, batch: F.mse_loss(output, batch["target"]),
        batch_size=6,
        microbatch_size=2,
        cuts=["last"],
    )
    check_layouts(job, [n for n in MIXES if "pp=2" in n], batches=batches)
    check_layouts(job.with_fields(cuts=()), REPLICAS, batches=batches)


# ---- B037: schedules x microbatches x virtual stages ------------------------------------------------------


def four_layers() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8])
def test_every_legal_schedule_ends_with_the_same_gradients(num_microbatches: int) -> None:
    """Every schedule with 1 or 2 stages a rank ends bit-equal for 1 to 8 microbatches (B037)."""
    data = TensorDataset(random_rows(16, 3), random_rows(16, 3, seed=1))
    job = make_job(four_layers, data, batch_size=8, microbatch_size=-(-8 // num_microbatches))
    schedules = ["gpipe", "1f1b", "interleaved", "zero-bubble", "gpipe,virtual=2"]
    layouts = [f"pp=2,schedule={s}" for s in schedules]
    layouts += ["pp=4", "pp=4,schedule=zero-bubble", "pp=3,schedule=gpipe"]
    layouts += ["dp=2,pp=2,schedule=interleaved"] if num_microbatches > 1 else []
    check_layouts(job, layouts, steps=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_an_illegal_pair_is_refused_with_the_rule(schedule: str) -> None:
    """Several stages a rank under a schedule for one are refused with the rule (B037)."""
    with pytest.raises(LayoutError, match="schedule=interleaved"):
        Layout.parse(f"pp=2,schedule={schedule},virtual=2")


# ---- B038, B054: one true norm -----------------------------------------------------------------------------


class Weighted(nn.Module):
    """Multiply inputs by weights, one module (and so one stage) for each, and add up."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(n, 1, bias=False) for n in sizes).double()

    def forward(self, x: Tensor) -> Tensor:
        widths = [part.weight.shape[1] for part in self.parts]  # type: ignore[union-attr]
        total = x.new_zeros((x.shape[0], 1))
        for part, piece in zip(self.parts, x.split(widths, 1), strict=True):
            total = total + part(piece)
        return total


def clipped(sizes: tuple[int, ...], rows: list[list[float]], **fields: Any) -> Any:
    data = TensorDataset(torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows)))
    return make_job(
        lambda: Weighted(*sizes),
        data,
        loss=lambda output, target: output.sum(),
        batch_size=len(rows),
        microbatch_size=1,
        clip_grad_norm=1.0,
        **fields,
    )


@pytest.mark.parametrize(("kind", "norm"), [(2.0, 5.0), (math.inf, 4.0)])
def test_clipping_uses_the_norm_over_all_stages(kind: float, norm: float) -> None:
    """Gradients 3 and 4 on two stages are clipped by their common norm, known on both (B038)."""
    job = clipped((1, 1), [[1.0, 3.0], [1.0, 0.5], [1.0, 0.5]], clip_norm_type=kind)
    one = check_layouts(job, MIXES, steps=1)
    assert one.norms == [near(norm)]
    grads = [float(g) for g in one.grads.values() if g is not None]
    assert grads == near([3 / norm, 4 / norm], 1e-5)


def test_the_norm_counts_every_weight_once() -> None:
    """Gradients 3, 4 (one weight) and 12 (another) have the norm 13 on every rank of every layout (B054)."""
    job = clipped((2, 1), [[1.0, 2.0, 4.0], [1.0, 1.0, 4.0], [1.0, 1.0, 4.0]])
    one = check_layouts(job, MIXES, steps=1)
    assert type(one.norms[0]) is float
    assert one.norms == [near(13.0)]
    first, second = one.grads.values()
    assert first is not None and second is not None
    assert first.tolist() == [near([3 / 13, 4 / 13], 1e-5)]
    assert second.tolist() == [near([12 / 13], 1e-5)]


class Tied(nn.Module):
    """An embedding whose table is also the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.table.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mix(self.table(ids))))


def test_a_tied_weight_counts_once_in_the_norm() -> None:
    """A weight on the first and the last stage is one in the norm, clipping and update (B038)."""
    data = TensorDataset(torch.arange(12) % 5, torch.arange(12) % 4)
    job = make_job(
        Tied,
        data,
        loss=nn.CrossEntropyLoss(),
        optimizer=adamw(0.05, weight_decay=0.1),
        batch_size=6,
        microbatch_size=2,
        clip_grad_norm=0.1,
    )
    check_layouts(job, (*MIXES, "pp=3", "dp=2,pp=3", "pp=3,schedule=zero-bubble"))


# ---- B056: recompute ---------------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2), nn.Dropout(0.2)
    ).double()


def test_recompute_repeats_the_same_random_numbers() -> None:
    """Gradients with dropout are bit-equal with recompute off and on, on one device and on many (B056)."""
    data = TensorDataset(random_rows(18, 4), random_rows(18, 2, seed=1))
    job = make_job(with_dropout, data, batch_size=6, microbatch_size=2)
    one = train_in_memory(job, "dp=1")
    for layout in ("dp=1", "dp=2", "dp=3", "pp=2", "pp=2,schedule=zero-bubble", "dp=2,pp=2"):
        for recompute in ("false", "true"):
            assert_same_bits(train_in_memory(job, f"{layout},recompute={recompute}"), one)


class Thinning(nn.Module):
    """Change a mask in place (it wants no gradient) between the layers that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mask = (h.detach() > 0).double()
        h = self.b(h + mask)
        mask.mul_(0.5).add_(0.25)
        return self.c(h * mask)


@pytest.mark.parametrize("layout", ["pp=2", "pp=3", "dp=2,pp=2", "pp=3,schedule=zero-bubble"])
def test_recompute_starts_from_what_a_stage_was_given(layout: str) -> None:
    """A received tensor that a stage changes in place is as it was when the forward runs again (B056)."""
    data = TensorDataset(random_rows(12, 4), random_rows(12, 2, seed=1))
    job = make_job(lambda: Thinning().double(), data, batch_size=6, microbatch_size=2)
    one = train_in_memory(job, "dp=1")
    assert_same_bits(train_in_memory(job, layout), one)
    assert_same_bits(train_in_memory(job, f"{layout},recompute=true"), one)


# ---- B040: loops that depend on data --------------------------------------------------------------------


class Turn(nn.Module):
    """Turn pairs of features by a shared table of cosines and sines, then mix."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.table[0], self.table[1]  # type: ignore[index]
        a, b = x[:, :2], x[:, 2:]
        return torch.tanh(self.mix(torch.cat([a * cos - b * sin, a * sin + b * cos], 1)))


class Loop(Turn):
    """Turn as often as the data says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().mean() * 3) + 1):
            x = super().forward(x)
        return x


def turning() -> nn.Module:
    angles = torch.tensor([0.1, 0.4], dtype=torch.float64)
    table = torch.stack([angles.cos(), angles.sin()])
    return nn.Sequential(Turn(table), Loop(table), Turn(table), Turn(table)).double()


@pytest.mark.parametrize("cuts", [[], ["2"], ["1"]])
def test_a_block_that_loops_by_its_data_is_not_cut(cuts: list[str]) -> None:
    """A block whose loop depends on data runs as a whole, and cuts fall around it (B040)."""
    x = random_rows(1, 4).repeat(12, 1) + 1e-3 * random_rows(12, 4, seed=1)
    data = TensorDataset(x, random_rows(12, 4, seed=2))
    job = make_job(turning, data, batch_size=6, microbatch_size=2, cuts=cuts)
    layouts = MIXES if not cuts else [n for n in MIXES if "pp=2" in n]
    check_layouts(job, layouts, steps=2)
    notes = train_in_memory(job, "pp=2", 0).workers[0].notes
    assert any('module "1" runs as a whole' in note for note in notes)


# ---- in real ranks -----------------------------------------------------------------------------------------


def test_real_pipelines_follow_changing_shapes_and_clip_alike() -> None:
    """Two processes train batches of changing length, then clip by one norm (B034, B038)."""
    sizes = [(4, 5), (4, 3), (1, 3)]
    batches = [(random_rows(b, n, 3, seed=b + n), random_rows(b, n, 1, seed=9)) for b, n in sizes]
    data = TensorDataset(random_rows(4, 5, 3), random_rows(4, 5, 1))
    shapes = make_job(two_layers, data, optimizer=sgd(), batch_size=4, microbatch_size=2)
    norms = clipped((1, 1), [[1.0, 3.0], [2.0, 1.0]])

    def rank(context: Any) -> Any:
        with Session(shapes, "pp=2", device=context.device) as session:
            losses = [session.step(batch).loss for batch in batches]
        with Session(norms, "pp=2", device=context.device) as session:
            steps = [session.step(batch) for batch in session.batches(1)]
            own = session.model.get_parameter(f"parts.{context.rank}.weight").grad
            return losses, steps[0].grad_norm, float(own)

    first, second = run_ranks(rank, 2, device="cpu", timeout=60)
    expected = train_in_memory(shapes, "dp=1", batches=batches)
    assert first[0] == second[0] == expected.losses
    assert first[1] == second[1] == near(5.0)
    assert (first[2], second[2]) == (near(0.6, 1e-5), near(0.8, 1e-5))


def test_real_ranks_run_every_schedule() -> None:
    """Two processes run gpipe, 1f1b, interleaved and zero-bubble with the bits of one device (B037)."""
    data = TensorDataset(random_rows(16, 3), random_rows(16, 3, seed=1))
    job = make_job(four_layers, data, batch_size=8, microbatch_size=3)
    layouts = [f"pp=2,schedule={s}" for s in ("gpipe", "1f1b", "interleaved", "zero-bubble")]

    def rank(context: Any) -> Any:
        found = []
        for layout in layouts:
            with Session(job, layout, device=context.device) as session:
                found.append([session.step(batch).loss for batch in session.batches(1)])
                state = session.state()
                found.append(None if state is None else {n: t.tolist() for n, t in state.tensors.items()})
        return found

    first = run_ranks(rank, 2, device="cpu", timeout=60)[0]
    expected = train_in_memory(job, "dp=1", 2)
    weights = {n: p.tolist() for n, p in expected.params.items()}
    assert first == [expected.losses, weights] * len(layouts)
