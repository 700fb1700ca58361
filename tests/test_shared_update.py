"""What the user does between steps counts once and shows at once, though replicas share memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.session import Session
from scenarios import (
    adamw,
    assert_same_bits,
    check_layouts,
    make_job,
    random_rows,
    same,
    sgd,
    train_in_memory,
    train_plainly,
)
from sharing import (
    images,
    is_shared,
    matrices,
    state_of,
)

# ---- what the user does between steps ---------------------------------------------------------------------------


def each_parameter(change: Callable[[nn.Parameter], None], *steps: int) -> Callable[[list[nn.Module], int], None]:
    """Change every parameter of every rank before some steps."""

    def between(models: list[nn.Module], step: int) -> None:
        if step in steps:
            with torch.no_grad():
                for model in models:
                    for p in model.parameters():
                        change(p)  # type: ignore[arg-type]

    return between


def shrink(p: nn.Parameter) -> None:
    p.mul_(0.9)


def shrink_data(p: nn.Parameter) -> None:
    p.data.mul_(0.9)


def replace_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.9


def shift_one(p: nn.Parameter) -> None:
    p.view(-1)[-1].add_(0.5)


def clamp(p: nn.Parameter) -> None:
    p.clamp_(-0.1, 0.1)


def swap_and_shrink(p: nn.Parameter) -> None:
    """Put other memory in the parameter's place, and write to it later, too."""
    p.data = p.data.clone()
    p.mul_(0.9)


CHANGES = (shrink, shrink_data, replace_data, clamp, swap_and_shrink)


@pytest.mark.parametrize("change", [*CHANGES, shift_one])
def test_parameters_changed_between_steps(change: Callable[[nn.Parameter], None]) -> None:
    """What the user writes to parameters, in any way, counts once: one device's bits, and those of a plain loop."""
    make = matrices if change is shift_one else images  # view(-1) cannot show channels-last
    for steps in ((1, 2), (0, 3)):
        check_layouts(make(), ("dp=2", "dp=3"), 5, between=each_parameter(change, *steps))
    run = train_in_memory(make(), "dp=2", 5, between=each_parameter(change, 1, 2, 4))
    assert is_shared(run)
    assert_same_bits(run, train_in_memory(make(), "dp=1", 5, between=each_parameter(change, 1, 2, 4)))


def test_parameters_changed_where_the_gradient_is_clipped() -> None:
    """The same with the norm of all gradients in between."""
    job = images(clip_grad_norm=0.3)
    check_layouts(job, ("dp=2", "dp=3"), 4, between=each_parameter(shrink, 1, 3))


def test_parameters_changed_before_a_step_that_is_skipped() -> None:
    """A change outlives a step without an update, and still counts once."""
    batches = [(random_rows(8, 7, seed=k), random_rows(8, 3, seed=k + 10)) for k in range(6)]
    batches[2] = (batches[2][0], batches[2][1] * torch.nan)
    job = matrices(on_nonfinite="skip")
    between = each_parameter(shrink, 1, 2, 3)
    one = train_in_memory(job, "dp=1", batches=batches, between=between)
    for layout in ("dp=2", "dp=3"):
        run = train_in_memory(job, layout, batches=batches, between=between)
        assert [result.skipped for result in run.results] == [False, False, True, False, False, False]
        assert repr(run.losses) == repr(one.losses)
        assert all(same(run.params[name], one.params[name]) for name in one.params)
        assert is_shared(run)


def test_a_change_shows_at_once_to_the_rank_that_made_it_alone() -> None:
    """What one rank writes it sees itself; another rank sees its own values until the next step."""
    seen: list[float] = []

    def between(models: list[nn.Module], step: int) -> None:
        if step == 2:
            with torch.no_grad():
                for model in models:
                    weight = model.first.weight  # type: ignore[union-attr]
                    old = weight[0, 0].item()  # type: ignore[index,operator]
                    weight.mul_(2.0)  # type: ignore[operator,union-attr]
                    seen.append(weight[0, 0].item() / old)  # type: ignore[index,operator]

    train_in_memory(matrices(), "dp=3", 4, between=between)
    assert seen == [2.0] * 3


def freeze(model: nn.Module, step: int) -> None:
    """Freeze the first layer for two steps, and the last one for one of them."""
    names = {1: ["first"], 2: ["first", "third"]}.get(step, [])
    for name, p in model.named_parameters():
        p.requires_grad_(name.split(".")[0] not in names)


def test_freezing_between_steps() -> None:
    """Parameters that are frozen for some steps stay as they are and go on with the state they had."""

    def between(models: list[nn.Module], step: int) -> None:
        for model in models:
            freeze(model, step)

    job = matrices(optimizer=adamw(weight_decay=0.1))
    check_layouts(job, ("dp=2", "dp=3", "dp=2,pp=2"), 6, between=between)
    run = train_in_memory(job, "dp=2", 6, between=between)
    steps = {n: s["step"].item() for n, s in state_of(run.workers).optimizer.items()}
    assert steps == {"first.weight": 4.0, "second.weight": 6.0, "third.weight": 5.0}


def test_parameters_are_shared_again_after_freezing() -> None:
    """Once the same parameters are trained from step to step again, replicas share memory again."""

    def between(models: list[nn.Module], step: int) -> None:
        for model in models:
            freeze(model, step)

    assert is_shared(train_in_memory(matrices(), "dp=2", 6, between=between))


def test_gradients_after_each_step_are_those_of_the_whole_batch() -> None:
    """Between steps every rank finds in ``.grad`` the gradient of the whole batch, one device's to the bit."""
    found: dict[int, list[list[Tensor]]] = {}

    def look(models: list[nn.Module], step: int) -> None:
        if step:
            found[len(models)].append([p.grad.clone() for m in models for p in m.parameters() if p.grad is not None])

    for layout, count in (("dp=1", 1), ("dp=2", 2), ("dp=3", 3)):
        found[count] = []
        train_in_memory(images(clip_grad_norm=0.5), layout, 4, between=look)
    for count in (2, 3):
        for one, several in zip(found[1], found[count], strict=True):
            assert len(several) == count * len(one) == count * 5
            assert all(same(grad, one[k % len(one)]) for k, grad in enumerate(several))
    plain = train_plainly(images(clip_grad_norm=0.5), 3).grads
    for grad, expected in zip(found[2][-1], plain.values(), strict=False):
        assert expected is not None and (grad - expected).abs().max() < 1e-10


def out_of_step(context: RankContext) -> Any:
    """Train 40 steps, with more or less to do before each; look at gradients and change parameters between them."""
    chance, grads = random.Random(context.rank), []
    with Session(images(clip_grad_norm=0.5, epochs=20), "dp=3") as session:
        for step, batch in zip(range(40), session.batches(), strict=False):
            torch.ones(chance.choice((1, 1, 1000, 10**6))).sum()
            session.step(batch)
            torch.ones(chance.choice((1, 1, 1000, 10**6))).sum()
            grads.append([p.grad.clone() for p in session.model.parameters() if p.grad is not None])
            each_parameter(shrink, *range(0, 40, 3))([session.model], step)
        active = session.worker.engine.commons.active
        return active, grads, [p.detach().clone() for p in session.model.parameters()]


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name needs Linux")
def test_ranks_that_are_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks, each early or late in turns, read and change only what belongs to the step they are in."""
    monkeypatch.setenv("MESHWISE_TRANSPORT", "shared")
    found = run_ranks(out_of_step, 3, device="cpu", timeout=60)
    grads: list[list[Tensor]] = []

    def between(models: list[nn.Module], step: int) -> None:
        if step:
            grads.append([p.grad.clone() for p in models[0].parameters() if p.grad is not None])
            each_parameter(shrink, *range(0, 40, 3))(models, step - 1)

    one = train_in_memory(images(clip_grad_norm=0.5), "dp=1", 40, between=between)
    between([worker.model for worker in one.workers], 40)
    for active, theirs, weights in found:
        assert active
        for step, (mine, expected) in enumerate(zip(theirs, grads, strict=True)):
            assert all(same(a, b) for a, b in zip(mine, expected, strict=True)), step
        assert all(same(a, b) for a, b in zip(weights, one.params.values(), strict=True))


def test_what_a_rank_does_to_its_gradients_is_its_own() -> None:
    """A rank that changes its ``.grad`` after a step changes no other rank's."""
    seen: list[list[float]] = []

    def between(models: list[nn.Module], step: int) -> None:
        if step == 2:
            ratios = []
            for model in models:
                grad = model.first.weight.grad  # type: ignore[union-attr]
                before = grad[0, 0].item()  # type: ignore[index,operator,union-attr]
                grad.mul_(0.5)  # type: ignore[operator,union-attr]
                ratios.append((before, grad[0, 0].item() / before))  # type: ignore[index,operator,union-attr]
            seen.append([b for b, _ in ratios] + [r for _, r in ratios])

    train_in_memory(matrices(), "dp=2", 3, between=between)
    ((first, second, *ratios),) = seen
    assert first == second and ratios == [0.5, 0.5]


class Pointwise(nn.Module):
    """Convolutions of 1 x 1 in channels last: only the strides of dims of size 1 tell which kernel is meant."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of 16 channels to 4 numbers."""
        out: Tensor = self.net(x.contiguous(memory_format=torch.channels_last))
        return out


def test_parameters_keep_their_strides_in_shared_memory() -> None:
    """Also those of dims of size 1, or replicas would run other kernels than one device."""
    data = [(random_rows(16, 8, 8, seed=k).float(), random_rows(4, seed=k + 50).float()) for k in range(16)]
    job = make_job(Pointwise, data, optimizer=sgd(0.1, momentum=0.9), batch_size=8, microbatch_size=2)
    one = train_in_memory(job, "dp=1", 4)
    strides = {n: p.stride() for n, p in one.workers[0].model.named_parameters()}
    assert strides["net.0.weight"] == (16, 1, 16, 16)
    for layout in ("dp=2", "dp=3", "dp=2,pp=2"):
        run = train_in_memory(job, layout, 4)
        assert is_shared(run)
        assert_same_bits(run, one)
        for worker in run.workers:
            held = {n: p for n, p in worker.model.named_parameters() if n in worker.held}
            assert held and all(p.stride() == strides[n] for n, p in held.items())
            assert all(p.grad is not None and p.grad.stride() == p.stride() for p in held.values())
