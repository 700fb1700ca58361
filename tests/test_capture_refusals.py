"""What a capture refuses to look into, what it checks on each batch, and that no data is baked in."""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from capturing import Inner, Whole, body, call, captured, check, reason, replay, rows, whole
from meshwise.errors import CaptureError
from meshwise.model.capture import capture, holds_for
from meshwise.model.graph import Buffer
from meshwise.model.selfcheck import difference

# ---- what is not looked into, and why ----------------------------------------------------------


def _loop(m: Inner, x: Tensor) -> Tensor:
    while x.abs().max() > 0.1:
        x = x * m.w * 0.5
    return x


def _hidden_input(m: Inner, x: Tensor) -> Tensor:
    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a + x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    return Add.apply(x * m.w)


def _counted(m: Inner, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.w


def _remembered(m: Inner, x: Tensor) -> Tensor:
    old = 0.0 if m.kept is None else m.kept
    m.kept = x.detach().mean()
    return x * m.w + old


def _first_only(m: Inner, x: Tensor) -> Tensor:
    if m.count == 0:
        m.count = 1
        x = x + 1
    return x * m.w


def _hooked_tensor(m: Inner, x: Tensor) -> Tensor:
    h = x * m.w
    h.register_hook(lambda grad: grad * x.mean())
    return h


DEPENDENT = {
    "loop": (_loop, "reads the data"),
    "item": (lambda m, x: x * m.w * x[0, 0].item(), "reads the data of a tensor \\(item\\)"),
    "tolist": (lambda m, x: x * m.w * torch.tensor(x.tolist()).mean(), "tolist"),
    "numpy": (lambda m, x: x * m.w + torch.from_numpy(x.detach().numpy()).mean(), "numpy"),
    "array": (lambda m, x: x * m.w + float(numpy.asarray(x.detach()).mean()), "array"),
    "format": (lambda m, x: x * m.w * float(f"{x.detach().sum()}"), "format|repr|item"),
    "branch": (lambda m, x: x * m.w if x.sum() > 0 else x + m.w, "reads the data of a tensor"),
    "int": (lambda m, x: x * m.w * int(x.sum()), "__int__"),
    "index": (lambda m, x: x * m.w + len(range(x.abs().sum().long())), "__index__"),
    "equal": (lambda m, x: x * m.w * (1 + torch.equal(x, x)), "equal"),
    "parameter": (lambda m, x: x * m.w * m.w[0].item(), "item"),
    "buffer": (lambda m, x: x * m.w + m.seen.item(), "item"),
    "storage": (lambda m, x: x * m.w * x.untyped_storage()[0], "untyped_storage"),
    "pointer": (lambda m, x: x * m.w * (x.data_ptr() % 2 + 1), "data_ptr"),
    "selected rows": (lambda m, x: x * m.w + x[x[:, 0] > -9].shape[0], "size depends on the data"),
    "nonzero": (lambda m, x: x * m.w + (x != 9).nonzero().size(0), "size depends on the data"),
    "arange": (
        lambda m, x: x * m.w + len(torch.arange(x.detach().abs().sum() * 0 + 3)),
        "size depends on the data",
    ),
    "slice": (lambda m, x: x * m.w + x[: x.abs().sum().long() * 0 + 1].shape[0], "size depends on the data"),
    "python random": (lambda m, x: x * m.w if random.random() < 2 else x, "Python's or numpy's"),
    "numpy random": (lambda m, x: x * m.w if numpy.random.rand() < 2 else x, "Python's or numpy's"),
    "layer drop": (lambda m, x: x if torch.rand([]) < 0.3 else x * m.w, "reads the data"),
    "interval": (lambda m, x: x if 0.3 < torch.rand([]) < 0.6 else x * m.w, "reads the data"),
    "counter": (_counted, "changes its own attribute 'count'"),
    "memory": (_remembered, "."),
    "first time": (_first_only, "calls differ"),
    "tensor hook": (_hooked_tensor, "hook on a tensor"),
    "hidden input": (_hidden_input, "not among its arguments"),
    "reentrant checkpoint": (
        lambda m, x: checkpoint(lambda y: y * m.w, x, use_reentrant=True),
        "not among its arguments",
    ),
    "caught": (lambda m, x: _catching(m, x), "item"),
}


def _catching(m: Inner, x: Tensor) -> Tensor:
    try:
        return x * m.w * x.sum().item()
    except BaseException:  # noqa: BLE001  as careless as a user's
        return x * m.w


@pytest.mark.parametrize("name", DEPENDENT)
def test_code_that_looks_at_data_runs_as_the_user_wrote_it(name: str) -> None:
    """Whatever way Python learns of the data, its module runs as a whole, with the reason."""
    function, why = DEPENDENT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = reason(function)
    assert re.search(why, found), found


def test_a_backward_inside_the_forward_keeps_the_model_whole() -> None:
    """A backward in a module reaches into what came before it, so nothing can be cut."""

    def forward(m: Inner, x: Tensor) -> Tensor:
        x.sum().backward(retain_graph=True)
        return x * m.w

    assert "calls backward() inside its forward" in captured(body(forward)).blocked


def test_an_opaque_module_that_returns_its_input() -> None:
    """What an opaque module returns is its own even where that was its input in the trace."""
    model = body(lambda m, x: x if x.abs().max() < 1e6 else x * m.w + 1)
    graph = captured(model)
    assert set(graph.opaque) == {"inner"}
    for scale in (1, 1e9):
        assert torch.equal(replay(graph, model, rows() * scale), model(rows() * scale))


def test_a_change_through_a_view_reaches_what_it_views() -> None:
    """Data written through a view of a fresh tensor or a buffer makes that one depend on the data too."""

    def forward(m: Inner, x: Tensor) -> Tensor:
        table = torch.zeros(2)
        table[0].copy_(x.detach().sum())
        return x * m.w * table.sum().item()

    assert "item" in reason(forward)

    def remember(m: Whole, x: Tensor) -> Tensor:
        m.seen.view(-1)[0].copy_(x.detach().sum())
        return m.b(m.a(x))

    model = whole(remember)
    model.register_buffer("seen", torch.zeros(3))
    graph = captured(model)
    assert Buffer("seen") in [ref for n in graph.nodes for ref in n.mutates]
    assert model.seen.tolist() == [0, 0, 0]


def test_a_batch_that_the_forward_changes() -> None:
    """A forward that changes its input replays on a copy; one whose loss then looks at it is whole."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        x += 1
        return m.b(m.a(x))

    model = whole(forward)
    graph = captured(model)
    batch = rows()
    found = replay(graph, model, batch)
    assert torch.equal(batch, rows())
    assert torch.equal(found, model(batch))
    whole_graph = captured(whole(forward), use=lambda output, batch: (output.sum(1) - batch.sum(1)).sum())
    assert "the loss uses a tensor of the batch" in whole_graph.blocked


def test_an_opaque_module_is_run_on_each_batch() -> None:
    """A module with a loop that the data decides gives the model's own numbers on other data."""
    model = body(_loop)
    graph = captured(model)
    for n in (1, 3, 6):
        batch = rows(n) * n
        assert torch.equal(replay(graph, model, batch), model(batch))


def test_modules_of_one_class_are_opaque_together() -> None:
    """When one block cannot be looked into, its siblings are not either, but what is around them is."""
    blocks = nn.Sequential(nn.Linear(6, 6), Inner(_loop), nn.Linear(6, 6), Inner(_loop), nn.Linear(6, 3))
    graph = captured(blocks)
    assert set(graph.opaque) == {"1", "3"}
    assert sum(not n.opaque and n.module != "" for n in graph.nodes if n.outputs) == 3


def test_the_whole_model_is_blocked_with_its_module_named() -> None:
    """Data-dependent code in the model's own forward leaves nothing to cut; the reason names the class."""
    graph = captured(whole(lambda m, x: m.b(m.a(x)) * x.sum().item()))
    assert graph.blocked.startswith("Whole: Python reads the data of a tensor (item)")


def test_hooks_of_the_user_keep_running() -> None:
    """A module with a forward hook runs as a whole, so that its hook does."""
    model = body(lambda m, x: x * m.w)
    model.inner.register_forward_hook(lambda module, args, output: output + 1)
    graph = captured(model)
    assert graph.opaque == {"inner": "it has forward hooks"}
    assert torch.equal(replay(graph, model, rows()), model(rows()))


def test_a_number_that_an_opaque_module_returns() -> None:
    """A number from an opaque module would be baked in, so the module around it is opaque too."""
    inner = Inner(lambda m, x: (x * m.w, x.sum().item()))
    middle = Inner(lambda m, x: (lambda pair: pair[0] * pair[1])(m.part(x)))  # type: ignore[operator]
    middle.part = inner
    graph = captured(nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 3)))
    assert "1" in graph.opaque
    assert not graph.blocked


def test_a_tensor_that_leaves_an_opaque_module_by_a_side_door() -> None:
    """A tensor that an opaque module leaves in an attribute is not taken for a constant."""

    def leave(m: Inner, x: Tensor) -> Tensor:
        m.kept = x.sum().item() * x.detach()
        return x * m.w

    def take(m: Inner, x: Tensor) -> Tensor:
        return m.part(x) + m.part.kept  # type: ignore[operator, union-attr]

    middle = Inner(take)
    middle.part = Inner(leave)
    graph = captured(nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 3)))
    assert "1" in graph.opaque
    assert not graph.constants


def test_an_opaque_shape_is_checked_on_each_batch() -> None:
    """Code outside may rely on the shape an opaque module gave; for another one an error says so."""
    model = nn.Sequential(nn.Linear(6, 6), Inner(lambda m, x: x[: (x > 50).any().long().item() + 2] * m.w))
    model.append(Inner(lambda m, x: x.reshape(x.shape[0], 2, 3).flatten(1)))
    graph = captured(model)
    with pytest.raises(CaptureError, match='module "1" gave a tensor of shape'):
        replay(graph, model, rows() * 1000)


# ---- checks ------------------------------------------------------------------------------------


def test_a_check_of_the_data_is_repeated() -> None:
    """A test whose other outcome only raises does not block the model: each batch repeats it."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("too large")
        return m.b(m.a(x))

    model = whole(forward)
    graph = check(model)
    assert not graph.opaque
    with pytest.raises(ValueError, match="too large"):
        replay(graph, model, rows() * 1e6)


def test_a_branch_that_computes_before_it_raises_is_no_check() -> None:
    """A branch that does more than raise is a branch."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        if x.max() > 100:
            return m.b(torch.cat([x, x]) @ torch.ones(3, 3))
        return m.b(m.a(x))

    assert "reads the data" in captured(whole(forward)).blocked


# ---- the batch size ------------------------------------------------------------------------------


def _alone(m: Whole, x: Tensor) -> Tensor:
    return m.b(m.a(x)) + (1 if x.shape[0] == 1 else 2)


def test_a_number_of_samples_that_is_treated_otherwise_is_noticed() -> None:
    """A model that treats a single sample in another way has a graph that holds for all numbers but that one."""
    model = whole(_alone)
    graph = captured(model)
    assert not graph.blocked
    assert holds_for(graph, model, call, rows(9), num_samples=9)
    assert not holds_for(graph, model, call, rows(1), num_samples=1)


def test_a_number_of_samples_may_have_a_graph_of_its_own() -> None:
    """An exact graph is what the model does for that number of samples alone."""
    model = whole(_alone)
    graph = capture(model, call, rows(1), num_samples=1, exact=True)
    assert not graph.blocked
    assert not holds_for(graph, model, call, rows(4), num_samples=4)


# ---- nothing is baked in ------------------------------------------------------------------------


def test_constants_are_the_same_in_every_trace() -> None:
    """A tensor that Python makes anew from the batch is not a constant."""
    table = [torch.ones(6), torch.zeros(6)]
    model = whole(lambda m, x: m.b(m.a(x) + table[0]))
    graph = check(model)
    assert len(graph.constants) == 1
    pointers = iter(range(1000))
    drifting = whole(lambda m, x: m.b(m.a(x) + torch.from_numpy(numpy.full(6, next(pointers), "f"))))
    assert captured(drifting).blocked


def test_a_call_that_torch_does_not_show_is_noticed() -> None:
    """The self-check compares a graph with the forward, and tells one that gives other numbers."""
    model = whole(lambda m, x: m.b(m.a(x)))
    graph = captured(model)
    wrong = replace(graph, nodes=(*graph.nodes[:-1], replace(graph.nodes[-1], target=lambda *a: F.linear(*a) + 1)))
    assert difference(graph, model, call, rows(), 4) == ""
    assert "other numbers" in difference(wrong, model, call, rows(), 4)


def test_a_state_outside_the_model_is_noticed() -> None:
    """A forward that counts in a global changes from call to call, so it is not captured."""
    calls = iter(range(1000))
    model = whole(lambda m, x: m.b(m.a(x)) * next(calls))
    graph = captured(model, rows(5))  # two traces alone might take the count for a size
    assert graph.blocked or not holds_for(graph, model, call, rows(5), num_samples=5)


def test_a_plain_tensor_that_the_forward_changes() -> None:
    """In-place changes of a tensor that is no buffer are left to the user's own code."""
    model = body(lambda m, x: x * m.w + m.kept.add_(1))
    model.inner.kept = torch.zeros(6)
    assert "neither made in the forward nor a buffer" in captured(model).opaque["inner"]
