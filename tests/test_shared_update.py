"""The update in shared memory: for which optimizers it is done, and that no way to look at it shows a difference."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from meshwise.job import Job
from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.parallel.rows import RowLayout, view_like
from meshwise.parallel.segment import SharedMemoryError
from meshwise.runtime import elementwise
from meshwise.runtime.elementwise import FusedUpdate, allows_pieces
from meshwise.runtime.pieces import Part, Pieces, State, whole_state
from meshwise.runtime.state import WholeState, gather_state, restore_state
from meshwise.runtime.worker import Worker, drive_together
from meshwise.session import Session
from scenarios import (
    Run,
    Scale,
    adamw,
    assert_same_bits,
    check_layouts,
    make_job,
    make_workers,
    random_rows,
    same,
    train_in_memory,
    train_plainly,
)

Make = Callable[[Any], Optimizer]


def is_shared(run: Run) -> bool:
    """Tell whether all replicas of a run hold their parameters in shared memory; they must agree."""
    (active,) = {worker.engine.commons.active for worker in run.workers}
    return active


# ---- which optimizers ----------------------------------------------------------------------------------------


class Plain(Optimizer):
    """Descend; subclasses say how far for a parameter, given what they look at."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.change(p, place, group["lr"])

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update a parameter, the ``place``-th of its group."""
        assert p.grad is not None
        p.add_(p.grad, alpha=-lr)


class ByNorm(Plain):
    """Scale by the norms of the whole parameter and gradient, as LARS and LAMB do."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update by the ratio of the norms."""
        assert p.grad is not None
        p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-lr)


class ByNumDims(Plain):
    """Decay matrices, not vectors."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update and perhaps decay."""
        p.mul_(1 - lr * (0.1 if p.ndim > 1 else 0.0))
        super().change(p, place, lr)


class ByPlace(Plain):
    """Go less far the further behind a parameter is in its group."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update by the place."""
        super().change(p, place, lr / (1 + place))


class ConvsCentred(Plain):
    """Take the mean off the gradients of convolutions, as gradient centralization does; there alone."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update with a centred gradient."""
        assert p.grad is not None
        if p.ndim > 3:
            p.grad = p.grad - p.grad.mean(dim=(1, 2, 3), keepdim=True)
        super().change(p, place, lr)


def hooked(params: Any) -> Optimizer:
    """Halve the gradients before a step."""
    optimizer = SGD(params, lr=0.01)

    def halve(opt: Optimizer, args: Any, kwargs: Any) -> None:
        for p in opt.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer


def muon(params: Any) -> Optimizer:
    """Make Muon where this torch has it."""
    made: Optimizer = torch.optim.Muon(params, lr=0.01)
    return made


def adafactor(params: Any) -> Optimizer:
    made: Optimizer = torch.optim.Adafactor(params, lr=0.01)
    return made


ELEMENTWISE: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.01),
    "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adamax": lambda p: Adamax(p, lr=0.01),
}
WHOLE: dict[str, Make] = {
    "own": Plain,  # nobody but its author knows what it does at a later step
    "adafactor": adafactor,
    "muon": muon,
    "hook": hooked,
    "norm": ByNorm,
    "ndim": ByNumDims,
    "place": ByPlace,
    "conv": ConvsCentred,
}
if not hasattr(torch.optim, "Muon"):  # torch 2.9 has it
    del WHOLE["muon"]
each_elementwise = pytest.mark.parametrize("name", ELEMENTWISE)
each_whole = pytest.mark.parametrize("name", WHOLE)


class Matrices(nn.Module):
    """Layers without biases, of odd sizes: what every optimizer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 41, bias=False), nn.Linear(41, 30, bias=False)
        self.third = nn.Linear(30, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map 7 features to 3."""
        out: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Images(nn.Module):
    """A convolution whose weights lie channels-last, a vector, a parameter of no dims, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = Scale(1.5)
        self.last = nn.Linear(5 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of 75 numbers, images of 5 x 5, to 3."""
        found = torch.relu(self.conv(x.view(-1, 3, 5, 5)))
        out: Tensor = self.last(self.scale(found).flatten(1))
        return out


def job_of(model: type[nn.Module], features: int, **fields: Any) -> Job:
    """Make a job of 20 samples in steps of 8, 8 and 4, in float64."""
    data = [(random_rows(features, seed=k), random_rows(3, seed=k + 100)) for k in range(20)]
    given = {"batch_size": 8, "microbatch_size": 2, "optimizer": adamw(), "precision": "float64", **fields}
    return make_job(model, data, **given)


def matrices(**fields: Any) -> Job:
    return job_of(Matrices, 7, **fields)


def images(**fields: Any) -> Job:
    return job_of(Images, 75, **fields)


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


# ---- pieces ---------------------------------------------------------------------------------------------------


def odd_parameters() -> list[nn.Parameter]:
    """Give parameters of many shapes and two dtypes, in two groups (the first four, the others)."""
    torch.manual_seed(0)
    conv = torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last)
    tensors = [
        *(torch.randn(37), torch.randn(()), conv, torch.randn(1)),
        *(torch.randn(30, 41), torch.randn(3), torch.randn(900, dtype=torch.float64), torch.randn(41, 30).t()),
        *(torch.randn(1), torch.randn(2000)),
    ]
    return [nn.Parameter(tensor) for tensor in tensors]


LATE, NEVER, SELDOM = (0, 4), (5,), (2, 9)  # parameters without a gradient in the first, in all, in odd steps


def grads_of(step: int, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Give the gradients of a step; some parameters have none in some steps."""
    generator = torch.Generator().manual_seed(step)

    def draw(k: int, p: Tensor) -> Tensor | None:
        drawn = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        absent = k in NEVER or (k in LATE and step < 2) or (k in SELDOM and step % 2)
        return None if absent else drawn

    return [draw(k, p) for k, p in enumerate(parameters)]


def make_odd(make: Any) -> tuple[list[nn.Parameter], Optimizer]:
    """Make an optimizer over the parameters, in two groups."""
    parameters = odd_parameters()
    return parameters, make([{"params": parameters[:4], "lr": 0.05}, {"params": parameters[4:]}])


class Member:
    """Hold one rank's pieces, and the row of all."""

    def __init__(self, row: Tensor, layout: RowLayout, share: tuple[int, int], whole: Optimizer, make: Any) -> None:
        self.parameters, self.optimizer = make_odd(make)
        self.optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
        groups = [0] * 4 + [1] * (len(self.parameters) - 4)
        self.pieces = Pieces(
            row=row,
            layout=layout,
            parameters=self.parameters,
            groups=groups,
            share=share,
            optimizer=self.optimizer,
        )
        self.pieces.install()

    def step(self, sums: Tensor, present: Sequence[bool]) -> None:
        """Update the own pieces by a row of gradients."""
        self.pieces.part(present)
        for piece in self.pieces.pieces:
            grad = sums[piece.start : piece.stop].view(piece.parameter.dtype)
            there = present[piece.first]
            piece.parameter.grad = (grad if piece.parameter.ndim else grad[0]) if there else None
        self.optimizer.step()


def gather(members: Sequence[Member], parameters: Sequence[Tensor]) -> dict[int, State]:
    """Put the state of all members' pieces together, by index of the parameter."""
    found: dict[int, list[tuple[Part, State]]] = {}
    for part, state in (pair for member in members for pair in member.pieces.states()):
        found.setdefault(part.index, []).append((part, state))
    return {k: whole_state(parameters[k], parts) for k, parts in found.items()}


def assert_same_state(found: dict[int, State], whole: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Demand the state of the whole optimizer: keys, plain values, and the bits and memory order of tensors."""
    expected = {k: whole.state[p] for k, p in enumerate(parameters) if whole.state.get(p)}
    assert found.keys() == expected.keys()
    for k, state in expected.items():
        assert found[k].keys() == state.keys()
        for key, value in state.items():
            mine = found[k][key]
            if isinstance(value, Tensor):
                assert same(mine, value) and mine.stride() == value.stride(), (k, key)
            else:
                assert type(mine) is type(value) and mine == value


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["momentum", "adam", "amsgrad", "rmsprop"])
def test_a_state_survives_being_cut_and_put_together(name: str, members: int) -> None:
    """The optimizer's state goes to pieces and back without a change, and the pieces go on with the same bits."""
    make = {
        "momentum": lambda groups: SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1),
        "adam": lambda groups: Adam(groups, lr=0.01),
        "amsgrad": lambda groups: AdamW(groups, lr=0.01, amsgrad=True),
        "rmsprop": lambda groups: RMSprop(groups, lr=0.01, centered=True),
    }[name]
    parameters, whole = make_odd(make)

    def step(number: int) -> list[Tensor | None]:
        grads = grads_of(number, parameters)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        whole.step()
        return grads

    for number in range(3):
        step(number)
    layout = RowLayout.of(parameters)
    row, sums = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    for offset, p in zip(layout.offsets, parameters, strict=True):
        view_like(row, offset, p).copy_(p.detach())
    ranks = [Member(row, layout, layout.share(m, members), whole, make) for m in range(members)]
    assert_same_state(gather(ranks, parameters), whole, parameters)
    for number in range(3, 7):
        grads = step(number)
        for offset, grad in zip(layout.offsets, grads, strict=True):
            if grad is not None:
                view_like(sums, offset, grad).copy_(grad)
        for rank in ranks:
            rank.step(sums, [grad is not None for grad in grads])
    assert all(same(view_like(row, o, p), p.detach()) for o, p in zip(layout.offsets, parameters, strict=True))
    state = gather(ranks, parameters)
    assert_same_state(state, whole, parameters)
    for rank in ranks:
        rank.pieces.load(copy.deepcopy(state))
    assert_same_state(gather(ranks, parameters), whole, parameters)
    for rank in ranks:
        rank.pieces.remove()
        groups = [group["params"] for group in rank.optimizer.param_groups]
        assert all(
            a is b
            for group, part in zip(groups, (slice(0, 4), slice(4, None)), strict=True)
            for a, b in zip(group, rank.parameters[part], strict=True)
        )
        assert not rank.optimizer.state


# ---- checkpoints ----------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Use a layer only in batches that bring something for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.scale = nn.Linear(7, 41), nn.Linear(5, 41), Scale(0.7)
        self.last = nn.Linear(41, 3)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Map 7 features to 3."""
        found = self.first(x)
        if more is not None:
            found = found + self.more(more)
        out: Tensor = self.last(self.scale(torch.tanh(found)))
        return out


def sometimes_loss(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["y"])


def sometimes_batches(count: int) -> list[dict[str, Tensor]]:
    """Give global batches; every third brings something for the other layer."""
    batches = []
    for k in range(count):
        batch = {"x": random_rows(8, 7, seed=k), "y": random_rows(8, 3, seed=50 + k)}
        batches.append(batch | ({"more": random_rows(8, 5, seed=90 + k)} if k % 3 == 1 else {}))
    return batches


def sometimes(**fields: Any) -> Job:
    return make_job(
        Sometimes,
        [{"x": random_rows(7, seed=k), "y": random_rows(3, seed=k)} for k in range(8)],
        loss=sometimes_loss,
        batch_size=8,
        microbatch_size=2,
        optimizer=adamw(amsgrad=True),
        param_groups=lambda name, p: {"weight_decay": 0.1 if p.ndim > 1 else 0.0},
        precision="float64",
        **fields,
    )


def go_on(workers: Sequence[Worker], batches: Sequence[Any]) -> None:
    """Train on global batches."""
    for batch in batches:
        drive_together([w.step(w.split_batch(batch)) for w in workers])


def state_of(workers: Sequence[Worker]) -> WholeState:
    """Gather the whole state, as it stands now."""
    (found,) = [s for s in drive_together([gather_state(w) for w in workers]) if s is not None]
    return copy.deepcopy(found)  # type: ignore[no-any-return]


def assert_same_whole_state(found: WholeState, expected: WholeState) -> None:
    """Demand the same names, bits and numbers."""
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(same(found.tensors[n], t) for n, t in expected.tensors.items())
    assert found.optimizer.keys() == expected.optimizer.keys()
    for name, state in expected.optimizer.items():
        assert found.optimizer[name].keys() == state.keys()
        assert all(same(found.optimizer[name][k], v) for k, v in state.items()), name
    assert found.extra == expected.extra


def test_layers_without_a_gradient_in_some_steps_are_shared() -> None:
    """Where a layer's gradient comes and goes, so that step counts differ, replicas get one device's bits."""
    batches = sometimes_batches(7)
    one = train_in_memory(sometimes(), "dp=1", batches=batches)
    for layout in ("dp=2", "dp=3", "dp=4", "dp=2,pp=2"):
        run = train_in_memory(sometimes(), layout, batches=batches)
        assert_same_bits(run, one)
        assert "pp" in layout or is_shared(run)


@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("layout", ["dp=1", "dp=3", "dp=2,pp=2"])
def test_a_checkpoint_of_two_replicas_goes_on_under_any_layout(layout: str, begun: int) -> None:
    """A state of two replicas after 3 steps, loaded before or after other steps, goes on with one device's bits."""
    batches = sometimes_batches(6)
    straight = make_workers(sometimes(), "dp=1")
    go_on(straight, batches[:3])
    middle = state_of(straight)
    go_on(straight, batches[3:])
    writers = make_workers(sometimes(), "dp=2")
    go_on(writers, batches[:3])
    saved = state_of(writers)
    assert_same_whole_state(saved, middle)
    readers = make_workers(sometimes(), layout)
    go_on(readers, batches[:begun])
    for worker in readers:
        restore_state(worker, copy.deepcopy(saved))
    assert_same_whole_state(state_of(readers), saved)
    go_on(readers, batches[3:])
    assert_same_whole_state(state_of(readers), state_of(straight))
    go_on(writers, batches[3:])  # having been asked for its state changes nothing
    assert_same_whole_state(state_of(writers), state_of(straight))


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
