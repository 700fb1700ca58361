"""Reported faults of graph shape, control flow and autograd corners (shared/reports.md, parts B and C)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwise.errors import CaptureError, JobError
from meshwise.launch.local import run_ranks
from meshwise.session import Session
from scenarios import (
    MIXES,
    REPLICAS,
    Scale,
    adamw,
    check_layouts,
    column,
    make_job,
    near,
    random_rows,
    sgd,
    train_in_memory,
)


def mean_of(output: Tensor, target: Any) -> Tensor:
    """Take the output's mean as the loss."""
    return output.mean()


# ---- B009: heads used in turn ------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """A trunk, heads A and B, and a layer that is never used; all weights 1."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b, self.c = (nn.Linear(2, 2), *(nn.Linear(2, 1) for _ in range(3)))
        self.double()
        self.head = "a"
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor, head: str | None = None) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.a(hidden) if (head or self.head) == "a" else self.b(hidden)


def heads_job() -> Any:
    x = random_rows(24, 2)
    return make_job(
        TwoHeads,
        TensorDataset(x, x.sum(1, keepdim=True)),
        loss=lambda output, batch: (
            (output - (batch["target"] if isinstance(batch, dict) else batch)) ** 2
        ).mean(),
        optimizer=adamw(0.1, weight_decay=0.5),
        batch_size=6,
        microbatch_size=2,
    )


def test_a_head_that_a_step_does_not_use_stays_as_it_is() -> None:
    """Heads used in turn, chosen by a value in the batch, keep no gradient where unused (B009)."""
    batches = [
        {"x": random_rows(6, 2, seed=i), "target": random_rows(6, 1, seed=9 + i), "head": "ab"[i % 2]}
        for i in range(4)
    ]
    one = check_layouts(heads_job(), MIXES, batches=batches)
    assert one.grads["a.weight"] is None
    assert one.grads["c.weight"] is None
    first = train_in_memory(heads_job(), "dp=2,pp=2", batches=batches[:1])
    for name in ("b.weight", "b.bias", "c.weight", "c.bias"):
        assert bool((first.params[name] == 1.0).all())


def test_an_attribute_that_the_user_changes_between_steps_counts() -> None:
    """Heads used in turn, chosen by an attribute that the user sets between steps, are obeyed (B009)."""

    def choose(models: list[nn.Module], step: int) -> None:
        for model in models:
            model.head = "ab"[step % 2]  # type: ignore[assignment]

    one = check_layouts(heads_job(), MIXES, steps=4, between=choose)
    assert one.grads["a.weight"] is None
    assert one.grads["b.weight"] is not None


class ByTask(TwoHeads):
    """Choose the head by the name of the task that a microbatch is of."""

    def forward(self, x: Tensor, task: list[str]) -> Tensor:  # type: ignore[override]
        return super().forward(x, task[0])


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=3", "pp=2", "dp=2,pp=2"])
def test_heads_that_differ_inside_a_step_are_refused(layout: str) -> None:
    """Microbatches of one step that use different heads, on one rank or on several, are refused (B009)."""
    tasks = ["a"] * 6 + ["a"] * 3 + ["b"] * 3
    samples = [{"x": random_rows(2, seed=i), "task": tasks[i], "target": random_rows(1)} for i in range(12)]
    job = heads_job().with_fields(model=ByTask, train_data=samples, batch_size=6, microbatch_size=1)
    with pytest.raises(CaptureError, match="step 1: some of its microbatches use other parameters"):
        train_in_memory(job, layout, 2)


class Plain(nn.Module):
    """A trunk, a dropout whose rate the user may change, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(2, 3), nn.Dropout(0.0)
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.drop(self.first(x)))))


def test_a_batch_norm_that_the_user_switches_to_eval_stays_so() -> None:
    """A batch norm put in eval mode and frozen by the user between steps keeps its running values (B009)."""

    def freeze(models: list[nn.Module], step: int) -> None:
        for model in models if step == 2 else ():
            model.norm.eval().requires_grad_(False)

    data = TensorDataset(random_rows(24, 2), random_rows(24, 1, seed=1))
    job = make_job(Plain, data, batch_size=6, microbatch_size=2)
    check_layouts(job, MIXES, steps=4, between=freeze)


# ---- B012: nested outputs ----------------------------------------------------------------------------


@dataclass
class Scores:
    logits: Tensor
    aux: Any
    other: Tensor


class Named(NamedTuple):
    logits: Tensor
    aux: Any
    other: Tensor


class Nested(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.trunk, self.head, self.second = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        return self.kind(logits=self.head(hidden), aux=None, other=self.second(hidden))


@pytest.mark.parametrize("kind", [Scores, Named, dict])
def test_outputs_keep_their_class(kind: Any) -> None:
    """A model may return a dataclass, named tuple or dict with outputs the loss leaves out (B012)."""
    seen = set()

    def loss(output: Any, target: Tensor) -> Tensor:
        seen.add(type(output))
        assert (output["aux"] if kind is dict else output.aux) is None
        return F.mse_loss(output["logits"] if kind is dict else output.logits, target)

    data = TensorDataset(random_rows(12, 3), random_rows(12, 2, seed=1))
    job = make_job(lambda: Nested(kind), data, loss=loss, batch_size=6, microbatch_size=2)
    one = check_layouts(job, MIXES)
    assert seen == {kind}
    assert one.grads["second.weight"] is None


# ---- B013: a gradient penalty ------------------------------------------------------------------------


class Penalty(nn.Module):
    """y = w x^2 + b, and the penalty's dy/dx as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.w * x**2 + self.b
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope


@pytest.mark.parametrize("size", [1, 2, [3, 1]])
def test_a_gradient_penalty_reaches_the_weights(size: Any) -> None:
    """A penalty on dy/dx as the only loss gives w its whole gradient and b none (B013)."""
    x = column(1, 2, 3, 4)
    job = make_job(
        Penalty, TensorDataset(x, x), loss=lambda g, t: (g**2).mean(), batch_size=4, microbatch_size=size
    )
    one = check_layouts(job, [n for n in REPLICAS if size == 1 or "dp=3" not in n], steps=1)
    assert one.grads["w"] == near(30.0)
    assert one.grads["b"] is None


def test_a_penalty_in_the_users_forward_reaches_all_stages() -> None:
    """A gradient penalty taken by forward= through the whole model is the plain loop's (B013)."""

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch[0].detach().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, slope

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + (output[1].norm(dim=1) - 1).pow(2).mean()

    job = make_job(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).double(),
        TensorDataset(random_rows(12, 3), random_rows(12, 1, seed=1)),
        loss=loss,
        forward=forward,
        batch_size=6,
        microbatch_size=2,
    )
    check_layouts(job, REPLICAS)


# ---- B014, B016: the model is used in another way than prepared ----------------------------------------


def test_a_replaced_parameter_is_refused_by_name() -> None:
    """A parameter that the user replaces after the start is refused at the next step, by its name (B014)."""
    x = column(1, 2)
    job = make_job(
        lambda: nn.Sequential(nn.Linear(1, 1, bias=False)).double(),
        TensorDataset(x, x),
        loss=mean_of,
        batch_size=2,
        microbatch_size=1,
    )

    def replace(models: list[nn.Module], step: int) -> None:
        for model in models:
            model[0].weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))  # type: ignore[index]

    for layout in ("dp=1", "dp=2"):
        with pytest.raises(JobError, match=r"'0\.weight' was replaced"):
            train_in_memory(job, layout, 1, between=replace)


def test_new_values_in_a_parameter_are_used() -> None:
    """Values that the user copies into a parameter, or into its data, count from then on (B014)."""
    x = column(1, 2)

    def fill(models: list[nn.Module], step: int) -> None:
        for model in models:
            weight = model[0].weight  # type: ignore[index]
            if step == 1:
                with torch.no_grad():
                    weight.copy_(torch.full((1, 1), 3.0))
            elif step == 2:
                weight.data = torch.full((1, 1), 5.0, dtype=torch.float64)

    job = make_job(
        lambda: nn.Sequential(nn.Linear(1, 1, bias=False)).double(),
        TensorDataset(x, x),
        batch_size=2,
        microbatch_size=1,
    )
    check_layouts(job, ["dp=2"], steps=3, between=fill)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False).double(), Scale(1.0)
        nn.init.ones_(self.body.weight)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the job calls encode and head")


def test_helper_methods_work_like_forward() -> None:
    """Training through a helper method and an inner module averages as through forward (B016)."""
    x = column(1, 2)
    job = make_job(
        Encoder,
        TensorDataset(x, x),
        loss=mean_of,
        forward=lambda model, batch: model.head(model.encode(batch[0])),
        batch_size=2,
        microbatch_size=1,
    )
    one = check_layouts(job, ["dp=2", "pp=2", "dp=2,pp=2"], steps=1)
    assert one.grads["body.weight"] == near(1.5)


# ---- B017: in place on a view ------------------------------------------------------------------------


class AddsInPlace(nn.Module):
    """Block a: Linear and squeeze; block b adds its own Linear output in place to that view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 1), nn.Linear(3, 1), Scale(2.0)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).squeeze(-1)
        hidden += self.b(x).squeeze(-1)
        return self.c(hidden.relu_())


@pytest.mark.parametrize("cut", ["b", "c"])
def test_adding_in_place_to_a_view_works_over_a_cut(cut: str) -> None:
    """A stage may begin with an in-place addition to a view that the stage before made (B017)."""
    data = TensorDataset(random_rows(12, 3), random_rows(12, seed=1))
    check_layouts(make_job(AddsInPlace, data, batch_size=6, microbatch_size=2, cuts=[cut]), MIXES)


# ---- B018: hooks of the user -------------------------------------------------------------------------


class Hooked(nn.Module):
    def __init__(self, calls: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(2, 1, bias=False).double(), Scale(1.0)
        nn.init.ones_(self.layer.weight)

        def double(grad: Tensor) -> Tensor:
            calls.append(grad)
            return grad * 2

        self.layer.weight.register_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(x))


@pytest.mark.parametrize("layout", MIXES)
def test_a_gradient_hook_runs_once_a_step_on_the_whole_gradient(layout: str) -> None:
    """A hook that doubles a weight's gradient runs once on each rank that holds it, and counts (B018)."""
    calls: list[Tensor] = []
    data = TensorDataset(torch.ones(3, 2, dtype=torch.float64), torch.ones(3))
    job = make_job(lambda: Hooked(calls), data, loss=mean_of, batch_size=3, microbatch_size=1)
    run = train_in_memory(job, layout, 1)
    assert run.grads["layer.weight"] is not None
    assert run.grads["layer.weight"].tolist() == [[2.0, 2.0]]
    assert [c.tolist() for c in calls] == [[[1.0, 1.0]]] * run.workers[0].layout.dp


def test_a_hook_is_not_lost_on_the_way_to_the_ranks() -> None:
    """A hook on a parameter of a model instance works in the ranks, or is refused by its name (B018)."""
    model = Hooked([])
    data = TensorDataset(torch.ones(2, 2, dtype=torch.float64), torch.ones(2))
    job = make_job(model, data, loss=mean_of, batch_size=2, microbatch_size=1)

    def rank(context: Any) -> list[list[float]]:
        with Session(job, f"dp={context.world_size}", device=context.device) as session:
            for batch in session.batches(1):
                session.step(batch)
            grad: list[list[float]] = session.model.layer.weight.grad.tolist()
            return grad

    assert run_ranks(rank, 2, device="cpu", timeout=60) == [[[2.0, 2.0]]] * 2


# ---- B019: a function that reads the weight again ------------------------------------------------------


class ReadsAgain(torch.autograd.Function):
    """Scale the rows by a module's weight, which backward reads from the module anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, weight: Tensor | None) -> Tensor:
        ctx.module, ctx.wanted = module, weight is not None
        ctx.save_for_backward(x)
        return x * module.weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.module.weight, None, (grads[0] * x).sum(0) if ctx.wanted else None


class Sign(torch.autograd.Function):
    """The sign, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class RowScale(nn.Module):
    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.weight, self.passes = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64)), passes

    def forward(self, x: Tensor) -> Tensor:
        return ReadsAgain.apply(x, self, self.weight if self.passes else None)  # type: ignore[no-any-return]


@pytest.mark.parametrize("passes", [True, False])
def test_a_function_may_read_the_weight_again_in_backward(passes: bool) -> None:
    """A custom function that reads module.weight in backward sees the full weight there (B019)."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2, bias=False).double(), RowScale(passes), nn.Identity())

    data = TensorDataset(torch.ones(3, 2, dtype=torch.float64), torch.ones(3))
    job = make_job(build, data, loss=lambda o, t: o.sum(), batch_size=3, microbatch_size=1)
    layouts = MIXES if passes else REPLICAS
    one = check_layouts(job, layouts, steps=1)
    assert one.grads["0.weight"] is not None
    assert (one.grads["0.weight"] / 3).tolist() == [[2.0, 2.0], [3.0, 3.0]]
    check_layouts(job, layouts, steps=3)


def test_a_straight_through_sign_works() -> None:
    """A sign with a straight-through gradient trains as in a plain loop (B019)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Sign.apply(self.first(x)))  # type: ignore[no-any-return]

    data = TensorDataset(random_rows(12, 3), random_rows(12, 1, seed=1))
    check_layouts(make_job(Net, data, batch_size=6, microbatch_size=2), MIXES)


def test_real_ranks_train_what_the_reports_break() -> None:
    """Hooks, helper methods and a gradient penalty work in two processes (B013, B016, B018)."""

    def rank(context: Any) -> list[Any]:
        x = column(1, 2, 3, 4)
        jobs = [
            make_job(Penalty, TensorDataset(x, x), loss=lambda g, t: (g**2).mean(), batch_size=4),
            make_job(
                Encoder,
                TensorDataset(x[:2], x[:2]),
                loss=mean_of,
                forward=lambda model, batch: model.head(model.encode(batch[0])),
                optimizer=sgd(),
                batch_size=2,
            ),
            make_job(
                lambda: Hooked([]),
                TensorDataset(torch.ones(2, 2, dtype=torch.float64), torch.ones(2)),
                loss=mean_of,
                batch_size=2,
            ),
        ]
        found = []
        for job, name in zip(jobs, ("w", "body.weight", "layer.weight"), strict=True):
            with Session(job, "dp=2", device=context.device) as session:
                for batch in session.batches(1):
                    session.step(batch)
                found.append(session.model.get_parameter(name).grad.tolist())
        return found

    assert run_ranks(rank, 2, device="cpu", timeout=60) == [[near(30.0), [[1.5]], [[2.0, 2.0]]]] * 2
