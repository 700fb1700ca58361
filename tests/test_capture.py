"""What a capture records of a plain module, and what it leaves alone."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capturing import Inner, Whole, body, call, captured, check, reason, replay, rows, whole
from meshwise.model.capture import holds_for
from meshwise.model.graph import Affine
from meshwise.model.units import analyse
from meshwise.tree import leaves

Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    """Hold what a model returns."""

    hidden: Tensor
    extra: Tensor | None = None


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """Square and double, compiled."""
    return x * x * 2.0


class Cube(torch.autograd.Function):
    """A function whose gradient is not the derivative: 7 times what comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Give x³."""
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Give 7 g."""
        return 7 * grads[0]


# ---- what is recorded ------------------------------------------------------------------------


def test_a_graph_runs_at_any_batch_size() -> None:
    """A graph captured on four samples gives the model's outputs and gradients on 1, 2, 4 and 7."""
    graph = check(whole(lambda m, x: m.b(torch.relu(m.a(x)))))
    assert [n.module for n in graph.nodes] == ["a", "", "b"]


def test_sizes_are_linear_in_the_batch() -> None:
    """Sizes that Python computes from the batch become scale * batch + offset."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        n = x.shape[0]
        padded = torch.cat([m.a(x), torch.ones(2 * n + 3, 6)])
        return m.b(padded.reshape(3 * n + 3, 2, 3).flatten(1))

    graph = check(whole(forward))
    assert {Affine(2, 3), Affine(3, 3)} <= set(leaves([n.args for n in graph.nodes]))


def test_a_size_that_is_not_linear_is_refused() -> None:
    """A model that builds n * n * n elements would be wrong for most n, which the self-check finds."""
    model = whole(lambda m, x: m.b(m.a(x)).sum() + torch.ones(x.shape[0] ** 3).sum())
    assert "other numbers" in captured(model).blocked


def test_changes_in_place_are_recorded() -> None:
    """In-place calls, views of what they change and masked assignments replay exactly."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        h = m.a(x)
        h.mul_(2)
        h[:, :2] += 1
        first = h[0]
        first.add_(1)
        h[h > 1] = 0.5
        return m.b(h.t().t()) + h[:, [0]]

    graph = check(whole(forward))
    assert any(n.mutates for n in graph.nodes)
    assert not graph.opaque


def test_no_cut_parts_a_view_from_a_change_of_its_memory() -> None:
    """Between a view and the in-place change of what it views there is no legal cut."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        h = m.a(x)
        view = h[:, :3]
        h2 = m.b(h * 2)
        h.add_(1)
        return h2[:, :3] + view

    graph = check(whole(forward))
    legal = analyse(graph).legal
    changed = next(i for i, n in enumerate(graph.nodes) if n.mutates)
    made = next(i for i, n in enumerate(graph.nodes) if n.module == "a")
    assert not any(legal[made + 1 : changed + 1])


def test_expanded_and_transposed_tensors_are_recorded() -> None:
    """Views that are not contiguous, or expanded, replay with the same numbers."""
    check(whole(lambda m, x: m.b(m.a(x).t().contiguous().t() + m.a.bias.expand(x.shape[0], -1))))


def test_a_tensor_that_is_contiguous_only_for_one_sample() -> None:
    """contiguous() gives its argument for one sample and a copy for more: the graph holds for both."""
    model = whole(lambda m, x: m.b(m.a(x)[..., 1:].contiguous().view(-1, 5) @ m.a.weight[:5]))
    graph = check(model, sizes=(1, 2, 4))
    assert not graph.opaque
    assert holds_for(graph, model, call, rows(1), num_samples=1)


def test_masks_keep_a_shape() -> None:
    """where, masked_fill and repeat_interleave by an int have shapes that Python may read."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        h = m.a(x).masked_fill(x > 0, 0.0)
        h = torch.where(x > 1, h, x).repeat_interleave(2, dim=0)
        return m.b(h.view(h.shape[0] // 2, 2, 6).sum(1))

    assert not check(whole(forward)).opaque


def test_one_module_called_twice_shares_its_weights() -> None:
    """A module that is called twice contributes twice to its gradient."""
    check(whole(lambda m, x: m.a(m.b(m.a(x)))))


def test_a_custom_function_keeps_its_gradient() -> None:
    """A custom autograd function is one call, and its own backward is what runs."""
    graph = check(whole(lambda m, x: m.b(Cube.apply(m.a(x)))))
    assert any(getattr(n.target, "__name__", "") == "Cube" for n in graph.nodes)


def test_a_script_function_is_one_call() -> None:
    """A TorchScript function, of which torch shows nothing, is recorded and not baked in."""
    graph = check(whole(lambda m, x: m.b(scripted(m.a(x)))))
    assert any(n.target is scripted for n in graph.nodes)
    assert not graph.constants


def test_vmap_is_recorded_by_its_operators() -> None:
    """What runs under vmap is recorded below it, at any batch size."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        return m.b(torch.vmap(lambda row: row * row.sum() + m.a.bias)(m.a(x)))

    assert not check(whole(forward)).opaque


def test_a_custom_function_under_vmap_is_not_looked_into() -> None:
    """Below vmap a custom backward would be lost, so its module runs as a whole."""

    class Twice(Cube):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

    assert "Twice inside a torch.func transform" in reason(lambda m, x: torch.vmap(Twice.apply)(x))


def test_no_grad_and_detach_are_recorded() -> None:
    """Gradients stop in the graph where they stop in the model."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = m.a(x)
        return m.b(h + m.a(x).detach() + x)

    check(whole(forward))


def test_autocast_inside_a_forward_is_recorded() -> None:
    """A region that the forward itself runs under autocast replays in that precision."""

    def forward(m: Whole, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
        return m.b(h.float())

    graph = check(whole(forward))
    assert [bool(n.autocast) for n in graph.nodes if n.module] == [True, False]


def test_a_capture_under_autocast_is_of_its_dtypes() -> None:
    """Under autocast, dtypes that Python reads are those of autocast."""
    model = whole(lambda m, x: m.b(m.a(x).to(m.a(x).dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        graph = captured(model)
    assert torch.bfloat16 in leaves([n.args for n in graph.nodes])
    assert not any(n.autocast for n in graph.nodes)


@pytest.mark.parametrize("make", [Pair, Result, lambda a, b: {"a": a, "b": b}, lambda a, b: [a, (b, 3, None)]])
def test_outputs_keep_their_structure(make: Callable[[Tensor, Tensor], Any]) -> None:
    """Named tuples, dataclasses, dicts, lists, numbers and None come back as the model gave them."""
    model = whole(lambda m, x: make(m.a(x), m.b(x)))
    graph = check(model)
    found = replay(graph, model, rows())
    assert type(found) is type(call(model, rows()))


def test_keyword_inputs_and_none() -> None:
    """A dict batch with a None entry is passed by name."""

    def forward(m: Whole, x: Tensor, mask: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        assert mask is None
        assert y is not None
        return m.b(m.a(x) + y)

    model = whole(forward)
    batch = {"x": rows(), "mask": None, "y": rows()}
    graph = captured(model, batch)
    assert torch.equal(replay(graph, model, batch), call(model, batch))


def test_unused_outputs_are_known() -> None:
    """Given the loss, a graph knows which outputs it touches."""
    graph = captured(whole(lambda m, x: (m.a(x), m.b(x))), use=lambda output, batch: output[1].sum())
    first, second = leaves(graph.output)
    assert graph.used_outputs == {second.index}
    assert first != second


def test_a_loss_that_takes_a_tensor_behind_the_models_back() -> None:
    """A loss that uses a tensor of the forward which the model does not return keeps the model whole."""
    held: list[Tensor] = []

    def forward(m: Whole, x: Tensor) -> Tensor:
        held[:] = [m.a(x)]
        return m.b(held[0])

    graph = captured(whole(forward), use=lambda output, batch: output.sum() + held[0].sum())
    assert "does not return" in graph.blocked


# ---- what a capture leaves alone -----------------------------------------------------------------


def test_a_capture_changes_nothing() -> None:
    """Buffers, parameters, attributes, hooks and all random states are as before."""

    def forward(m: Inner, x: Tensor) -> Tensor:
        m.seen.add_(1)
        m.notes.append(1)  # type: ignore[operator, union-attr]
        m.extra = 3
        random.random()
        numpy.random.rand()
        return F.dropout(x, 0.5) * m.w

    model = body(forward)
    model.inner.notes = []  # type: ignore[assignment]
    model.norm = nn.BatchNorm1d(6)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore
    captured(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore
    assert model.inner.notes == []
    assert not hasattr(model.inner, "extra")


def test_a_capture_leaves_a_waiting_backward_alone() -> None:
    """Buffers that the forward only reads are not written to, so a backward that saved them still runs."""
    model = whole(lambda m, x: m.b(m.a(x) * m.scale))
    model.register_buffer("scale", torch.ones(6))
    loss = model(rows()).sum()
    captured(model)
    loss.backward()
    assert model.a.weight.grad is not None


def test_batch_norm_is_a_row() -> None:
    """A BatchNorm is recorded as what couples the samples, and its statistics stay as they were."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    graph = captured(model)
    assert [n.row is not None for n in graph.nodes if n.module] == [False, False, True, False]
    assert int(model[1].num_batches_tracked) == 0


def test_batch_norm_with_a_cumulative_average_reads_a_buffer() -> None:
    """momentum=None reads the number of batches, which changes: nothing of it is baked in."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
    assert "BatchNorm" in captured(model).blocked
