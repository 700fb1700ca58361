"""What the capture tests share: small models around a function, and a graph run beside its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.model.capture import capture
from meshwise.model.codegen import Piece, compile_piece
from meshwise.model.graph import Attribute, Constant, Graph, Value
from meshwise.model.inputs import Inputs
from meshwise.model.units import analyse, find_units
from meshwise.tree import leaves, map_leaves


class Body(nn.Module):
    """Wrap a function of (module, *inputs) between two linear layers, in a submodule ``inner`` of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = Inner(function)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        """Run the three."""
        return self.last(self.inner(self.first(x)))


class Inner(nn.Module):
    """Run one function as a module with a weight and a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0
        self.kept: Tensor | None = None
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Run it."""
        return self.function(self, *inputs)


class Whole(nn.Module):
    """Be one function as a whole model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.function = function

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run it."""
        return self.function(self, *inputs, **options)


def body(function: Callable[..., Any]) -> Body:
    """Build a Body from fixed random numbers."""
    torch.manual_seed(0)
    return Body(function)


def whole(function: Callable[..., Any]) -> Whole:
    """Build a Whole from fixed random numbers."""
    torch.manual_seed(0)
    return Whole(function)


def rows(n: int = 4) -> Tensor:
    """Give n samples of 6 numbers."""
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(1))


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model as a job would."""
    return model(**batch) if isinstance(batch, dict) else model(batch)


def captured(model: nn.Module, batch: Any = None, **options: Any) -> Graph:
    """Capture a model on a batch (of 4 samples unless given)."""
    batch = rows() if batch is None else batch
    return capture(model, call, batch, num_samples=len(leaves(batch)[0]), **options)


def replay(graph: Graph, model: nn.Module, batch: Any) -> Any:
    """Run a graph on a batch with the model's own parameters, and give what the model would return."""
    assert not graph.blocked
    liveness = analyse(graph)
    piece = Piece(start=0, stop=len(graph.nodes), row=False)
    segment = compile_piece(graph, liveness, find_units(graph, liveness), piece)
    modules, params, buffers = (
        dict(model.named_modules()),
        dict(model.named_parameters()),
        dict(model.named_buffers()),
    )

    def attribute(ref: Attribute | Constant) -> Any:
        return (
            graph.constants[ref.index]
            if isinstance(ref, Constant)
            else getattr(modules[ref.module], ref.name)
        )

    out, _ = segment.run(
        Inputs(batch),
        (),
        [params[name] for name, _ in segment.sites],
        [buffers[name].clone() for name in segment.buffers],
        None,
        len(leaves(batch)[0]),
        lambda unit, host=False: None,
        attribute,
    )
    values = dict(zip(segment.gives, out, strict=True))
    return map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Value) else leaf, graph.output)


def check(model: nn.Module, sizes: tuple[int, ...] = (1, 2, 4, 7), **options: Any) -> Graph:
    """Capture, and compare outputs and gradients at several batch sizes with the model itself, exactly."""
    graph = captured(model, **options)
    for n in sizes:
        batch = rows(n)
        expected, found = call(model, batch), replay(graph, model, batch)
        pairs = list(zip(leaves(expected), leaves(found), strict=True))
        for a, b in pairs:
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert _grads(model, leaves(expected)) == _grads(model, leaves(found))
    return graph


def _grads(model: nn.Module, outputs: list[Any]) -> list[Any]:
    total = sum(t.sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad)
    assert isinstance(total, Tensor)
    found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [None if g is None else g.tolist() for g in found]


def reason(function: Callable[..., Any], path: str = "inner") -> str:
    """Give the reason for which ``inner`` runs as a whole; nothing else may."""
    graph = captured(body(function))
    assert set(graph.opaque) == {path}, graph.blocked or graph.opaque
    return graph.opaque[path]
