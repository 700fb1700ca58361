"""For which optimizers the update is shared: those that treat every element by itself, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from meshwise.parallel.segment import SharedMemoryError
from meshwise.runtime import elementwise
from meshwise.runtime.elementwise import FusedUpdate, allows_pieces
from scenarios import (
    assert_same_bits,
    same,
    train_in_memory,
)
from sharing import (
    ELEMENTWISE,
    WHOLE,
    each_elementwise,
    each_whole,
    images,
    is_shared,
    job_of,
    matrices,
)


@each_elementwise
def test_optimizers_that_treat_each_element_by_itself(name: str) -> None:
    """They may update pieces, and do: two and three replicas share memory and get one device's bits."""
    assert allows_pieces(ELEMENTWISE[name]([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(()))]))
    job = images(optimizer=ELEMENTWISE[name], param_groups=lambda n, p: {"lr": 0.02 if p.ndim > 1 else 0.003})
    one = train_in_memory(job, "dp=1", 4)
    for layout in ("dp=2", "dp=3"):
        run = train_in_memory(job, layout, 4)
        assert is_shared(run)
        assert_same_bits(run, one)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "momentum"])
def test_a_learning_rate_that_begins_at_0_hides_nothing(name: str) -> None:
    """A warm-up from 0 keeps one device's bits: the trial does not take a step that changes nothing for an answer."""

    def make(params: Any) -> Optimizer:
        optimizer = torch.optim.Adafactor(params) if name == "adafactor" else ELEMENTWISE[name](params)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer

    def warm_up(optimizer: Optimizer) -> Any:
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.02
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))

    job = matrices(optimizer=make, scheduler=warm_up)
    run = train_in_memory(job, "dp=2", 6)
    assert_same_bits(run, train_in_memory(job, "dp=1", 6))
    assert is_shared(run) == (name != "adafactor")


@each_whole
def test_optimizers_that_look_at_whole_parameters(name: str) -> None:
    """They are told from the others, and train with the same bits all the same, on parameters of each rank's own."""
    make = WHOLE[name]
    job = (images if name == "conv" else matrices)(optimizer=make)
    one = train_in_memory(job, "dp=1", 4)
    for layout in ("dp=2", "dp=3"):
        run = train_in_memory(job, layout, 4)
        assert_same_bits(run, one)
        assert not is_shared(run)
        assert run.workers[0].engine.commons.reason == "the optimizer is not known to treat every element by itself"


class TwoKinds(nn.Module):
    """Compute the middle in bfloat16, with parameters of that kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 41), nn.Linear(30, 3)
        self.middle = nn.Linear(41, 30, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Map 7 features to 3."""
        found = torch.tanh(self.middle(torch.tanh(self.first(x.float())).bfloat16()))
        out: Tensor = self.last(found.float())
        return out


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_a_group_of_two_dtypes(name: str) -> None:
    """Where a group holds parameters of two dtypes, replicas get one device's bits in both."""
    job = job_of(TwoKinds, 7, optimizer=ELEMENTWISE[name], precision="own")
    assert_same_bits(train_in_memory(job, "dp=2", 6), train_in_memory(job, "dp=1", 6))


class OneMemory(nn.Module):
    """Have two parameters in one memory, put there through ``.data``: no tie that anyone is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = nn.Linear(7, 41), nn.Linear(7, 41), nn.Linear(41, 3)
        self.same.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        """Map 7 features to 3."""
        x = x.float()
        out: Tensor = self.last(torch.tanh(self.first(x)) + torch.sin(self.same(x)))
        return out


def test_two_parameters_in_one_memory() -> None:
    """An update of one is seen in the other, on replicas as on one device."""
    job = job_of(OneMemory, 7, precision="own")
    assert_same_bits(train_in_memory(job, "dp=2"), train_in_memory(job, "dp=1"))


def test_a_kernel_that_does_not_tell_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no private view of the row can be had, replicas exchange messages."""

    def refuse(*arguments: Any) -> None:
        raise SharedMemoryError("/proc/self/pagemap cannot be read (Operation not permitted)")

    one = train_in_memory(matrices(), "dp=1")
    monkeypatch.setattr("meshwise.parallel.rows.PrivateView", refuse)
    run = train_in_memory(matrices(), "dp=2")
    assert_same_bits(run, one)
    assert not is_shared(run) and "pagemap" in run.workers[0].engine.commons.reason


def test_a_trial_leaves_the_optimizer_as_it_was() -> None:
    """Finding out what an optimizer does changes neither its state, its groups nor its parameters."""
    parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    optimizer = Adam([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.1}])
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state, before = repr(optimizer.state_dict()), [(p.detach().clone(), p.grad) for p in parameters]
    assert allows_pieces(optimizer) and FusedUpdate(optimizer, least=0) is not None
    assert all(same(p, old) and p.grad is grad for p, (old, grad) in zip(parameters, before, strict=True))
    assert repr(optimizer.state_dict()) == state
    assert [group["params"] for group in optimizer.param_groups] == [parameters[:1], parameters[1:]]


# ---- fused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "adamw", "amsgrad", "adagrad", "rmsprop"])
def test_the_fused_update_gives_the_bits_of_the_loop(name: str) -> None:
    """Whatever FusedUpdate chooses for each parameter, several steps give the bits of the optimizer's own loop."""

    def make() -> tuple[list[nn.Parameter], Optimizer]:
        generator = torch.Generator().manual_seed(3)
        shapes = [(64,), (63,), (65,), (128, 3), (), (1,), (17, 64), (4, 3, 5, 5), (8, 8, 2, 2), (2048,), (1000, 7)]
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        tensors[8] = tensors[8].to(memory_format=torch.channels_last)
        parameters = [nn.Parameter(t) for t in tensors]
        return parameters, ELEMENTWISE[name]([{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.3}])

    (mine, optimizer), (theirs, loop) = make(), make()
    fused = FusedUpdate(optimizer, least=0)
    before = [list(group["params"]) for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(4)
    for step in range(6):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            grad = torch.empty_like(a).copy_(torch.randn(a.shape, generator=generator))
            a.grad, b.grad = (
                (None, None) if (k + step) % 4 == 0 else (grad, grad.clone(memory_format=torch.preserve_format))
            )
        for group, other in zip(optimizer.param_groups, loop.param_groups, strict=True):
            group["lr"] = other["lr"] = group["lr"] * 0.7
        fused.step()
        loop.step()
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True)), step
        for a, b in zip(mine, theirs, strict=True):
            assert all(same(v, loop.state[b][k]) for k, v in optimizer.state[a].items() if isinstance(v, Tensor))
    after = [list(group["params"]) for group in optimizer.param_groups]
    assert all(a is b for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    assert all(group.get("fused") is None for group in optimizer.param_groups)


def test_a_kernel_with_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that differs in one bit of one element is noticed."""
    optimizer = Adam([nn.Parameter(torch.ones(64))])
    plain = elementwise.kernel_chosen

    def wrong(chosen: Optimizer, kernel: str) -> Any:
        for p in chosen.param_groups[0]["params"] if kernel else ():
            p.data.view(-1)[5:6].view(torch.int32).add_(1)
        return plain(chosen, "")

    monkeypatch.setattr(elementwise, "kernel_chosen", lambda chosen, kernel: plain(chosen, ""))
    assert elementwise.same_bits(optimizer, "fused")
    monkeypatch.setattr(elementwise, "kernel_chosen", wrong)
    assert not elementwise.same_bits(optimizer, "fused")
    assert not elementwise.allows_pieces(optimizer, "fused")
