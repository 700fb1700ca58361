"""Turn a range of a graph's nodes into one Python function without interpreter overhead.

A segment function has the form ``segment(inputs, values, leaves, buffers, rows, batch, seed, attribute, places)`` and
gives ``(values out, rebound buffers)``. ``places`` holds where a large leaf's gradient belongs, if it does so in the
backward. ``seed(unit, host)`` seeds torch's generators and, with ``host``, Python's
and numpy's. ``leaves`` are the parameters, one *site* for each unit that uses one: a parameter used by
several units has several sites, so that what each unit contributes to its gradient is added up in one order
under every layout.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .graph import (
    Affine,
    Attribute,
    BatchNormRow,
    Buffer,
    Constant,
    Graph,
    Input,
    Node,
    Param,
    Ref,
    Value,
    find_refs,
)
from .linear import linear
from .units import Liveness, Unit, find_refs_in_output, node_params

Site = tuple[str, int]  # parameter name, node group (unit, part of a unit, or a row) that uses it
PART_BITS = 32  # a part of a unit has the number of its first node above these bits


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Hold one compiled run of nodes with what it takes and gives."""

    run: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    takes: tuple[int, ...]  # values it receives
    gives: tuple[int, ...]  # values it hands on
    sites: tuple[Site, ...]
    buffers: tuple[str, ...]
    changes: tuple[str, ...]  # buffers changed in place: it gets clones
    rebinds: tuple[str, ...]
    row: BatchNormRow | None  # the coupled row the segment begins with
    row_sites: tuple[Site, Site] | None  # weight and bias of that row
    statistics: tuple[BatchNormRow, ...]  # rows whose microbatch statistics it returns with the rebinds
    opaque: tuple[str, ...]
    source: str  # for a look at what runs


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Name the nodes ``start .. stop-1`` that a segment is made of."""

    start: int
    stop: int
    row: bool  # node ``start`` is a coupled BatchNorm, its statistics come from the whole row


def stage_pieces(graph: Graph, start: int, stop: int, *, coupled: bool) -> list[Piece]:
    """Part the nodes of a stage at its coupled rows."""
    rows = [i for i in range(start, stop) if coupled and graph.nodes[i].row is not None]
    edges = [start, *rows, stop]
    return [Piece(start=a, stop=b, row=k > 0) for k, (a, b) in enumerate(itertools.pairwise(edges))]


def crossing(liveness: Liveness, at: int) -> tuple[int, ...]:
    """List the values made before node ``at`` and used at or after it."""
    return liveness.alive[at]


def _near(units: Sequence[Unit], piece: Piece) -> Sequence[Unit]:
    """Give the units of a piece, and the one before it."""
    low = bisect.bisect_right(units, piece.start - 1, key=lambda u: u.start) - 1
    high = bisect.bisect_left(units, piece.stop, key=lambda u: u.start)
    return units[max(0, low) : high]


class Writer:
    """Write the source of one segment."""

    def __init__(
        self, graph: Graph, liveness: Liveness, units: Sequence[Unit], piece: Piece, statistics: str
    ) -> None:
        self.graph, self.liveness, self.piece = graph, liveness, piece
        self.unit_of = {i: u.index for u in _near(units, piece) for i in range(u.start, u.stop)}
        self.names: dict[str, Any] = {
            "torch": torch,
            "no_grad": torch.no_grad,
            "autocast": torch.autocast,
        }
        self.lines: list[str] = []
        self.sites: list[Site] = []
        self.buffers: list[str] = []
        self.statistics_mode = statistics
        self.statistics: list[BatchNormRow] = []
        self.row_sites: tuple[Site, Site] | None = None
        self.derives = liveness.derives
        self.takes = crossing(liveness, piece.start)
        self.gives = (
            crossing(liveness, piece.stop) if piece.stop < len(graph.nodes) else self._outputs()
        )

    def _outputs(self) -> tuple[int, ...]:
        refs = find_refs_in_output(self.graph)
        return tuple(sorted({r.index for r in refs if isinstance(r, Value)}))

    # ---- names -----------------------------------------------------------------------------------

    def bind(self, prefix: str, value: Any) -> str:
        """Give a Python object a name in the generated function's globals."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def site(self, name: str, group: int) -> str:
        """Name the local variable of a parameter's site."""
        key = (name, group)
        if key not in self.sites:
            self.sites.append(key)
        return f"p{self.sites.index(key)}"

    def buffer(self, name: str) -> str:
        """Name the local variable of a buffer."""
        if name not in self.buffers:
            self.buffers.append(name)
        return f"b{self.buffers.index(name)}"

    def expression(self, value: Any, unit: int) -> str:
        """Write an argument as a Python expression."""
        if isinstance(value, Value):
            return f"v{value.index}"
        if isinstance(value, Input):
            return f"inputs[{value.index}]"
        if isinstance(value, Param):
            return self.site(value.name, unit)
        if isinstance(value, Buffer):
            return self.buffer(value.name)
        if isinstance(value, (Constant, Attribute)):
            return f"attribute({self.bind('a', value)})"
        if isinstance(value, Affine):
            return f"({value.scale} * batch + {value.offset})"
        return self._plain(value, unit)

    def _plain(self, value: Any, unit: int) -> str:
        if value is None or value is Ellipsis or type(value) in (bool, int, str):
            return "..." if value is Ellipsis else repr(value)
        if isinstance(value, slice):
            return (
                f"slice({', '.join(self.expression(v, unit) for v in (value.start, value.stop, value.step))})"
            )
        if type(value) in (tuple, torch.Size):
            return f"({''.join(self.expression(v, unit) + ', ' for v in value)})"
        if type(value) is list:
            return f"[{', '.join(self.expression(v, unit) for v in value)}]"
        if isinstance(value, dict) and any(True for _ in find_refs(value)):
            return "{" + ", ".join(f"{k!r}: {self.expression(v, unit)}" for k, v in value.items()) + "}"
        return self.bind("c", value)

    # ---- statements ------------------------------------------------------------------------------

    def write(self) -> str:
        """Write the whole function."""
        last_seed = None
        for i in range(self.piece.start, self.piece.stop):
            node = self.graph.nodes[i]
            unit = self._part(self.unit_of[i])
            if (node.random or node.opaque) and last_seed != unit:
                self.lines.append(f"seed({unit}{', True' if self._runs_opaque(i) else ''})")
                last_seed = unit
            self._write_node(i, node, unit)
            self._drop_dead(i, node)
        return self._wrap()

    def _runs_opaque(self, i: int) -> bool:
        """Tell whether a unit runs code that may draw from Python's and numpy's generators too."""
        unit = self.unit_of[i]
        nodes = range(i, self.piece.stop)
        return any(self.graph.nodes[k].opaque for k in nodes if self.unit_of[k] == unit)

    def _part(self, unit: int) -> int:
        """Number a unit; what a coupled row parts from its start has sites and random numbers of its own."""
        parted = self.piece.row and self.unit_of.get(self.piece.start - 1) == unit
        return unit + (self.piece.start << PART_BITS if parted else 0)

    def _write_node(self, i: int, node: Node, unit: int) -> None:
        if node.row is not None:
            call = self._batch_norm_call(i, node, unit)
        elif node.opaque == "<model>":
            call = f"{self.bind('f', node.target)}(inputs.data)"
        elif self._is_lone_linear(node, unit):
            x, weight, bias = (self.expression(a, unit) for a in (*node.args, None)[:3])
            call = f"{self.bind('f', linear)}({x}, {weight}, {bias}, places, {weight[1:]})"
        else:
            args = [self.expression(a, unit) for a in node.args]
            args += [f"{k}={self.expression(v, unit)}" for k, v in node.kwargs.items()]
            call = f"{self.bind('f', node.target)}({', '.join(args)})"
        for name in node_params(self.graph, node) if node.opaque else ():
            self.site(name, unit)
        self.lines.extend(self._in_contexts(node, self._assign(node, call)))

    def _is_lone_linear(self, node: Node, unit: int) -> bool:
        """Tell whether a node is a linear layer whose weight nothing else in its unit uses."""
        if node.target is not F.linear or not 2 <= len(node.args) <= 3 or node.kwargs or not node.grad:
            return False
        x, weight = node.args[:2]
        if not isinstance(weight, Param) or not isinstance(x, (Value, Input)) or node.autocast or self.derives:
            return False
        nodes = (self.graph.nodes[i] for i in range(self.piece.start, self.piece.stop))
        uses = [n for n in nodes if weight in n.refs() or weight.name in node_params(self.graph, n)]
        return len(uses) == 1 and sum(ref == weight for ref in node.refs()) == 1

    def _in_contexts(self, node: Node, lines: list[str]) -> list[str]:
        contexts = [] if node.grad else ["no_grad()"]
        contexts += [f"autocast({d!r}, {self.bind('c', dtype)}, {on})" for d, on, dtype in node.autocast]
        if not contexts:
            return lines
        return [f"with {', '.join(contexts)}:", *("    " + line for line in lines)]

    def _assign(self, node: Node, call: str) -> list[str]:
        if node.opaque == "<model>":
            return [f"whole = {call}"]
        if not node.outputs:
            return [call]
        if len(node.outputs) == 1 and node.outputs[0][0] == ():
            return [f"v{node.outputs[0][1]} = {call}"]
        lines = [f"t = {call}"]
        for path, index in node.outputs:
            steps = "".join(f"[{k!r}]" if kind == "item" else f".{k}" for kind, k in path)
            lines.append(f"v{index} = t{steps}")
        return [*lines, "del t"]

    def _batch_norm_call(self, i: int, node: Node, unit: int) -> str:
        row = node.row
        assert row is not None
        group = -1 - i  # a row has sites of its own: what they collect are sums over one microbatch
        x = self.expression(row.input, unit)
        function = self.bind("f", torch.nn.functional.batch_norm)
        if self.piece.row and i == self.piece.start:
            self.row_sites = (
                ("" if row.weight is None else row.weight.name, group),
                ("" if row.bias is None else row.bias.name, group),
            )
            weight, bias = (self.site(*s) for s in self.row_sites)
            return f"{function}({x}, rows[0], rows[1], {weight}, {bias}, False, 0.0, {row.eps!r})"
        weight = "None" if row.weight is None else self.site(row.weight.name, unit)
        bias = "None" if row.bias is None else self.site(row.bias.name, unit)
        if self.statistics_mode == "microbatch" and row.running_mean is not None:
            k = len(self.statistics)
            self.statistics.append(row)
            like = self.buffer(row.running_mean.name)
            self.lines.append(f"s{k} = (torch.zeros_like({like}), torch.zeros_like({like}))")
            return f"{function}({x}, s{k}[0], s{k}[1], {weight}, {bias}, True, 1.0, {row.eps!r})"
        mean = "None" if row.running_mean is None else self.buffer(row.running_mean.name)
        var = "None" if row.running_var is None else self.buffer(row.running_var.name)
        return f"{function}({x}, {mean}, {var}, {weight}, {bias}, True, {row.momentum!r}, {row.eps!r})"

    def _drop_dead(self, i: int, node: Node) -> None:
        made = {index for _, index in node.outputs}
        used = {r.index for r in node.refs() if isinstance(r, Value)}
        dead = [
            v for v in sorted(made | used) if self.liveness.last_use.get(v, -1) <= i and v not in self.gives
        ]
        if dead and node.opaque != "<model>":
            self.lines.append("del " + ", ".join(f"v{v}" for v in dead))

    def _wrap(self) -> str:
        changed = self._changed_values()
        head = ["def segment(inputs, values, leaves, buffers, rows, batch, seed, attribute, places=None):"]
        head += self._private_inputs()
        if self.takes:
            head.append(f"    ({''.join(f'v{v}, ' for v in self.takes)}) = values")
            head += [f"    v{v} = v{v}.clone()" for v in self.takes if v in changed]  # kept for a recomputation
            head.append("    del values")
        if self.sites:
            head.append(f"    ({''.join(f'p{k}, ' for k in range(len(self.sites)))}) = leaves")
        if self.buffers:
            head.append(f"    ({''.join(f'b{k}, ' for k in range(len(self.buffers)))}) = buffers")
        out = "whole" if self.graph.blocked else f"({''.join(f'v{v}, ' for v in self.gives)})"
        rebinds = [self.expression(ref, -1) for _, ref in self._rebinds()]
        rebinds += [f"s{k}" for k in range(len(self.statistics))]
        tail = f"    return {out}, ({''.join(r + ', ' for r in rebinds)})"
        return "\n".join([*head, *("    " + line for line in self.lines), tail]) + "\n"

    def _private_inputs(self) -> list[str]:
        """Copy what the piece changes of the batch: a recomputation starts from the batch as it was."""
        nodes = self.graph.nodes[self.piece.start : self.piece.stop]
        changed = sorted({r.index for n in nodes for r in n.mutates if isinstance(r, Input)})
        if not changed or self.graph.blocked:
            return []
        return ["    inputs = list(inputs)", *(f"    inputs[{k}] = inputs[{k}].clone()" for k in changed)]

    def _changed_values(self) -> set[int]:
        nodes = self.graph.nodes[self.piece.start : self.piece.stop]
        return {r.index for n in nodes for r in n.mutates if isinstance(r, Value)}

    def _rebinds(self) -> list[tuple[str, Ref]]:
        low, high = self.piece.start, self.piece.stop
        inside = []
        for name, ref in self.graph.rebinds.items():
            at = self.graph.values[ref.index].producer if isinstance(ref, Value) else 0
            if low <= at < high:
                inside.append((name, ref))
        return inside


def compile_piece(
    graph: Graph, liveness: Liveness, units: Sequence[Unit], piece: Piece, *, statistics: str = "batch"
) -> Segment:
    """Compile one piece of a graph; with ``statistics`` "microbatch" BatchNorm rows return their own."""
    writer = Writer(graph, liveness, units, piece, statistics)
    source = writer.write()
    namespace = dict(writer.names)
    exec(compile(source, f"<segment {piece.start}:{piece.stop}>", "exec"), namespace)
    nodes = graph.nodes[piece.start : piece.stop]
    mutated = {r.name for n in nodes for r in n.mutates if isinstance(r, Buffer)}
    uncoupled = [n.row for k, n in enumerate(nodes) if n.row is not None and not (piece.row and k == 0)]
    if statistics == "batch":
        mutated |= {b.name for row in uncoupled for b in (row.running_mean, row.running_var) if b is not None}
    return Segment(
        run=namespace["segment"],
        takes=writer.takes,
        gives=() if graph.blocked else writer.gives,
        sites=tuple(writer.sites),
        buffers=tuple(writer.buffers),
        changes=tuple(b for b in writer.buffers if b in mutated),
        rebinds=tuple(name for name, _ in writer._rebinds()),
        row=graph.nodes[piece.start].row if piece.row else None,
        row_sites=writer.row_sites,
        statistics=tuple(writer.statistics),
        opaque=tuple(dict.fromkeys(n.opaque for n in nodes if n.opaque)),
        source=source,
    )
