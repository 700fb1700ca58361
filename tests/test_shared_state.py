"""An optimizer's state in pieces: cut, put together, saved and loaded, it is the state of one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from meshwise.job import Job
from meshwise.parallel.rows import RowLayout, view_like
from meshwise.runtime.pieces import Part, Pieces, State, whole_state
from meshwise.runtime.state import WholeState, restore_state
from meshwise.runtime.worker import Worker, drive_together
from scenarios import (
    Scale,
    adamw,
    assert_same_bits,
    make_job,
    make_workers,
    random_rows,
    same,
    train_in_memory,
)
from sharing import (
    is_shared,
    state_of,
)

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
