"""Make one graph of traces at several batch sizes: numbers that differ become ``scale * batch + offset``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from ..tree import leaves
from .graph import REFS, Affine, Graph, Node
from .trace import DataDependence, Trace

DIFFERS = "its calls differ from one batch to another"


def align(traces: Sequence[Trace]) -> tuple[Node, ...]:
    """Give the nodes that all traces have in common. Raises DataDependence naming the module that differs.

    The first two traces (of different sizes) fix the numbers, the others must agree with them.
    """
    first, again, *others = traces
    nodes = tuple(_align_nodes(first, again, _Pair(first.size, again.size)))
    first = dataclasses.replace(first, nodes=list(nodes))
    for other in others:
        _align_nodes(first, other, _At(other.size))
    for other in traces[1:]:
        _check_rest(first, other)
    return nodes


def agree(graph: Graph, trace: Trace) -> None:
    """Check a trace at a further size against a graph. Raises DataDependence naming what differs."""
    constants = list(graph.constants)
    known = Trace(
        size=0,
        nodes=list(graph.nodes),
        constants=constants,
        readers=[""] * len(constants),
        output=graph.output,
        used=trace.used,
        rebinds=graph.rebinds,
    )
    _align_nodes(known, trace, _At(trace.size))
    _check_rest(known, trace)


class _Pair:
    """Fit numbers of two traces."""

    def __init__(self, small: int, large: int) -> None:
        self.small, self.large = small, large

    def number(self, a: Any, b: Any) -> Any:
        """Give the number that is ``a`` in the one and ``b`` in the other, or None."""
        if type(a) is not int or type(b) is not int or a == b or self.small == self.large:
            return None
        scale, rest = divmod(b - a, self.large - self.small)
        return None if rest else Affine(scale, a - scale * self.small)


class _At:
    """Check the numbers of a further trace."""

    def __init__(self, size: int) -> None:
        self.size = size

    def number(self, a: Any, b: Any) -> Any:
        """Give ``a`` back where it is ``b`` for a batch of this size, else None."""
        if not isinstance(a, Affine) or type(b) is not int:
            return None
        return a if a.scale * self.size + a.offset == b else None


def _align_nodes(first: Trace, again: Trace, fit: _Pair | _At) -> list[Node]:
    nodes = []
    for a, b in zip(first.nodes, again.nodes, strict=False):
        if _shape_of_node(a) != _shape_of_node(b):
            raise DataDependence(_common(a.module, b.module), DIFFERS)
        args = _align_value(a.args, b.args, a, fit)
        kwargs = _align_value(a.kwargs, b.kwargs, a, fit)
        nodes.append(dataclasses.replace(a, args=args, kwargs=kwargs))
    if len(first.nodes) != len(again.nodes):
        longer = max((first.nodes, again.nodes), key=len)
        raise DataDependence(longer[len(nodes)].module, DIFFERS)
    return nodes


def _shape_of_node(node: Node) -> Any:
    owner = getattr(node.target, "__self__", None)
    target = (getattr(node.target, "__name__", node.target), getattr(owner, "__name__", None))
    flags = (node.opaque, node.module, node.mutates, node.grad, node.autocast, node.random)
    return target, tuple(path for path, _ in node.outputs), flags


def _common(a: str, b: str) -> str:
    parts = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        parts.append(x)
    return ".".join(parts)


def _align_value(a: Any, b: Any, node: Node, fit: _Pair | _At) -> Any:
    if isinstance(a, REFS) or isinstance(b, REFS):
        if a != b:
            raise DataDependence(node.module, "it uses other tensors from one batch to another")
        return a
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {k: _align_value(a[k], b[k], node, fit) for k in a}
    if isinstance(a, slice) and isinstance(b, slice):
        parts = zip((a.start, a.stop, a.step), (b.start, b.stop, b.step), strict=True)
        return slice(*(_align_value(x, y, node, fit) for x, y in parts))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        parts_list = [_align_value(x, y, node, fit) for x, y in zip(a, b, strict=True)]
        return parts_list if isinstance(a, list) else tuple(parts_list)
    number = fit.number(a, b)
    if number is not None:
        return number
    if _same_constant(a, b):
        return a
    raise DataDependence(node.module, f"a value in it depends on the batch ({a!r:.60} or {b!r:.60})")


def _same_constant(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if callable(a) or isinstance(a, (torch.Generator,)):
        return True  # a function made anew by each forward
    if isinstance(a, numpy.ndarray):
        return numpy.array_equal(a, b)
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # noqa: BLE001  an object that cannot be compared is another one
        return False


def _check_rest(first: Trace, again: Trace) -> None:
    _check_constants(first, again)
    _check_output(first, again)


def _check_constants(first: Trace, again: Trace) -> None:
    for a, b, reader in zip(first.constants, again.constants, first.readers, strict=False):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        if not alike or (a.layout == torch.strided and not torch.equal(a, b)):
            raise DataDependence(reader, "a tensor in it differs from one batch to another")
    if len(first.constants) != len(again.constants):
        raise DataDependence("", DIFFERS)


def _check_output(first: Trace, again: Trace) -> None:
    a, b = leaves(first.output), leaves(again.output)
    if len(a) != len(b) or any(
        x != y and (isinstance(x, REFS) or isinstance(y, REFS) or x == x) for x, y in zip(a, b, strict=True)
    ):
        raise DataDependence("", "the model returns another structure or number from one batch to another")
    if first.rebinds != again.rebinds or first.used != again.used:
        raise DataDependence("", "it rebinds or returns other tensors from one batch to another")
