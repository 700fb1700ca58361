"""Run a captured graph once beside the forward it was captured from: both must give the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..tree import leaves, map_leaves
from .codegen import Piece, compile_piece
from .graph import REFS, Attribute, Constant, Graph, Input, Value
from .inputs import Inputs
from .keep import as_in_export, kept_state
from .units import analyse, find_units


def difference(graph: Graph, model: nn.Module, forward: Any, batch: Any, size: int) -> str:
    """Say in what a graph differs from ``forward(model, batch)`` on ``size`` samples, or return ''."""
    with kept_state(model), as_in_export():
        output = forward(model, _copy(batch))
        wanted = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves(output)]
        end = torch.default_generator.get_state()
    with kept_state(model), as_in_export():
        found = _replay(graph, model, Inputs(_copy(batch)), size)
        drawn = torch.equal(end, torch.default_generator.get_state())
    for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if a is not None and b is not None and not _alike(a, b):
            return f"replaying its calls gives other numbers than it does (output {number})"
    return "" if drawn else "replaying its calls draws other random numbers than it does"


def _copy(batch: Any) -> Any:
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def _replay(graph: Graph, model: nn.Module, inputs: list[Any], size: int) -> list[Tensor | None]:
    liveness = analyse(graph)
    piece = Piece(start=0, stop=len(graph.nodes), row=False)
    segment = compile_piece(graph, liveness, find_units(graph, liveness), piece)
    modules = dict(model.named_modules())
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def attribute(ref: Attribute | Constant) -> Any:
        if isinstance(ref, Constant):
            return graph.constants[ref.index]
        return getattr(modules[ref.module], ref.name)

    out, _ = segment.run(
        inputs,
        (),
        [params[name] for name, _ in segment.sites],
        [buffers[name].clone() for name in segment.buffers],
        None,
        size,
        lambda unit, host=False: None,
        attribute,
    )
    values = dict(zip(segment.gives, out, strict=True))
    return [_look_up(leaf, values, inputs) for leaf in leaves(graph.output)]


def _look_up(leaf: Any, values: dict[int, Tensor], inputs: list[Any]) -> Tensor | None:
    if isinstance(leaf, Value):
        return values.get(leaf.index)
    if isinstance(leaf, Input):
        found: Tensor = inputs[leaf.index]
        return found
    return None if isinstance(leaf, REFS) or not isinstance(leaf, Tensor) else leaf


def _alike(a: Tensor, b: Tensor) -> bool:
    """Compare up to what a kernel that is not deterministic may change (nothing, on a host)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout != torch.strided:
        return True
    if a.device.type == "cpu" or not a.is_floating_point():
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return torch.allclose(a, b, rtol=1e-2, atol=1e-3 * float(a.detach().abs().max() or 1.0), equal_nan=True)
