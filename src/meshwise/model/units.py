"""Units: the pieces of a graph that are never cut, and stages made of consecutive units.

A unit starts at a node that uses parameters of another module call than the unit so far, wherever a cut
there is legal. Not legal is a cut that would part tensors sharing memory of which one is changed in place,
a gradient taken inside the forward from its inputs, a changed buffer from its readers, or that would send
what cannot be sent. Units come from the model alone, so they are the same under every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import CaptureError
from ..planner.stages import best_cuts
from .graph import Attribute, Buffer, Constant, Graph, Input, Node, Param, Ref, Value, find_refs

Key = tuple[str, int]
DERIVES = (torch.autograd.grad, torch.autograd.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Hold one unit: nodes ``start .. stop-1``, a name that train and eval share, and its cost."""

    index: int
    start: int
    stop: int
    key: Key  # module path, and how many units before it bear the same path
    params: tuple[str, ...]
    cost: float


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """Hold where each value is used last, and before which nodes a cut is legal.

    ``alive[i]``: the values made before node i and used at it or later. ``derives``: the forward itself runs backwards.
    """

    last_use: dict[int, int]
    legal: tuple[bool, ...]
    reasons: dict[int, str]
    row_reasons: dict[int, str]  # as ``reasons``, for a coupled row: a changed buffer does not stand in its way
    alive: tuple[tuple[int, ...], ...]
    derives: bool


def node_params(graph: Graph, node: Node) -> tuple[str, ...]:
    """List the parameters a node uses, those inside an opaque module included."""
    inner = graph.module_params.get(node.opaque, ()) if node.opaque else ()
    names = [r.name for r in node.refs() if isinstance(r, Param)]
    return tuple(dict.fromkeys((*names, *inner)))


def analyse(graph: Graph) -> Liveness:
    """Find the last use of every value and the legal cuts of a graph."""
    last_use = _last_uses(graph)
    reasons: dict[int, str] = {}
    row_reasons: dict[int, str] = {}
    for low, high, why, of_buffer in _spans(graph, last_use):
        for i in range(low + 1, high + 1):
            reasons.setdefault(i, why)
            if not of_buffer:
                row_reasons.setdefault(i, why)
    for index, info in graph.values.items():
        if not info.sendable:
            for i in range(info.producer + 1, last_use.get(index, -1) + 1):
                why = "a tensor that cannot be sent (sparse, nested or overlapping memory)"
                reasons.setdefault(i, why)
                row_reasons.setdefault(i, why)
    legal = tuple(i == 0 or i not in reasons for i in range(len(graph.nodes) + 1))
    return Liveness(
        last_use=last_use,
        legal=legal,
        reasons=reasons,
        row_reasons=row_reasons,
        alive=_alive(graph, last_use),
        derives=any(n.target in DERIVES for n in graph.nodes),
    )


def _alive(graph: Graph, last_use: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(len(graph.nodes) + 1)]
    for value, info in sorted(graph.values.items()):
        for at in range(info.producer + 1, min(last_use.get(value, -1), len(graph.nodes)) + 1):
            found[at].append(value)
    return tuple(map(tuple, found))


def _last_uses(graph: Graph) -> dict[int, int]:
    last: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        for ref in node.refs():
            if isinstance(ref, Value):
                last[ref.index] = i
    end = len(graph.nodes)
    for ref in (*find_refs_in_output(graph), *graph.rebinds.values()):
        if isinstance(ref, Value):
            last[ref.index] = end
    return last


def find_refs_in_output(graph: Graph) -> list[Ref]:
    """List the output's references that are used (all where that is not known)."""
    from .capture import output_refs

    used = graph.used_outputs
    return [r for r in output_refs(graph) if used is None or not isinstance(r, Value) or r.index in used]


def _uses(graph: Graph, ref: Ref) -> list[int]:
    return [i for i, node in enumerate(graph.nodes) if any(r == ref for r in node.refs())]


def _spans(graph: Graph, last_use: dict[int, int]) -> list[tuple[int, int, str, bool]]:
    """List (low, high, why, whether it is only for a buffer): no cut after ``low`` up to ``high``."""
    spans: list[tuple[int, int, str, bool]] = []
    by_storage: dict[int, list[int]] = {}
    for v, info in graph.values.items():
        by_storage.setdefault(info.storage, []).append(v)
    for i, node in enumerate(graph.nodes):
        for ref in node.mutates:
            of_buffer = isinstance(ref, Buffer)
            spans.extend((*span, of_buffer) for span in _mutation_spans(graph, last_use, by_storage, i, ref))
        spans.extend((*span, False) for span in _inner_gradient_spans(graph, i, node))
    spans.extend((*span, True) for span in _buffer_spans(graph))
    spans.extend((*span, False) for span in _opaque_spans(graph))
    return spans


def _mutation_spans(
    graph: Graph, last_use: dict[int, int], by_storage: dict[int, list[int]], i: int, ref: Ref
) -> list[tuple[int, int, str]]:
    if isinstance(ref, (Input, Buffer, Constant, Attribute)):
        uses = _uses(graph, ref)
        why = "a tensor changed in place that other calls use"
        return [(uses[0], uses[-1], why)] if uses else []
    if not isinstance(ref, Value):
        return []
    storage = graph.values[ref.index].storage
    aliases = by_storage.get(storage, []) if storage != -1 else []
    later = [v for v in aliases if last_use.get(v, -1) > i or v == ref.index]
    if len(later) < 2:
        return []
    first = min(graph.values[v].producer for v in later)
    last = min(max(last_use.get(v, i) for v in later), len(graph.nodes) - 1)
    return [(first, last, "tensors that share memory, one of them changed in place")]


def _inner_gradient_spans(graph: Graph, i: int, node: Node) -> list[tuple[int, int, str]]:
    if getattr(node.target, "__name__", "") == "requires_grad_":
        ref = node.args[0]
        uses = _uses(graph, ref)
        return [(i, uses[-1], "an input made to require gradients in the forward")]
    if getattr(node.target, "__name__", "") != "grad" or not graph.values:
        return []
    starts = []
    for ref in find_refs((*node.args[1:2], node.kwargs.get("inputs"))):
        starts.append(graph.values[ref.index].producer if isinstance(ref, Value) else _uses(graph, ref)[0])
    return [(min(starts, default=0), i, "a gradient taken inside the forward")]


def _buffer_spans(graph: Graph) -> list[tuple[int, int, str]]:
    changed = {r for n in graph.nodes for r in n.mutates if isinstance(r, Buffer)}
    changed |= {Buffer(name) for name in graph.rebinds}
    changed |= {b for n in graph.nodes if n.row for b in (n.row.running_mean, n.row.running_var) if b}
    uses: dict[Buffer, tuple[int, int]] = {}  # first and last
    for i, n in enumerate(graph.nodes):
        for ref in (*n.refs(), *_opaque_buffers(graph, n)):
            if isinstance(ref, Buffer) and ref in changed:
                uses[ref] = (uses.get(ref, (i, i))[0], i)
    return [(*span, f"buffer {buffer.name!r}, which the forward changes") for buffer, span in uses.items()]


def _opaque_buffers(graph: Graph, node: Node) -> list[Ref]:
    return [Buffer(b) for b in graph.module_buffers.get(node.opaque, ())] if node.opaque else []


def _opaque_spans(graph: Graph) -> list[tuple[int, int, str]]:
    spans = []
    inner = {p for n in graph.nodes if n.opaque for p in graph.module_params.get(n.opaque, ())}
    for name in inner:
        uses = [i for i, n in enumerate(graph.nodes) if name in node_params(graph, n)]
        if len(uses) > 1:
            spans.append((uses[0], uses[-1], f"parameter {name!r}, shared with a module that runs as a whole"))
    return spans


def find_units(graph: Graph, liveness: Liveness) -> tuple[Unit, ...]:
    """Divide the graph's nodes in units."""
    starts = [0]
    owner: tuple[str, int] | None = None
    for i, node in enumerate(graph.nodes):
        params = node_params(graph, node)
        if node.row is not None and i > starts[-1] and liveness.legal[i]:
            starts.append(i)  # what couples the samples begins a unit
            owner = (node.module, node.call)
            continue
        if not params:
            continue
        mine = (node.module, node.call) if node.module else (params[0], 0)
        if owner is not None and mine != owner and liveness.legal[i]:
            starts.append(i)
        owner = mine
    return _make_units(graph, starts)


def _make_units(graph: Graph, starts: list[int]) -> tuple[Unit, ...]:
    units: list[Unit] = []
    seen: dict[str, int] = {}
    for index, (start, stop) in enumerate(zip(starts, [*starts[1:], len(graph.nodes)], strict=True)):
        nodes = graph.nodes[start:stop]
        first = next((n for n in nodes if node_params(graph, n)), nodes[0] if nodes else None)
        path = "" if first is None else first.module or ",".join(node_params(graph, first))
        params = tuple(dict.fromkeys(p for n in nodes for p in node_params(graph, n)))
        units.append(
            Unit(
                index=index,
                start=start,
                stop=stop,
                key=(path, seen.get(path, 0)),
                params=params,
                cost=sum(n.cost for n in nodes),
            )
        )
        seen[path] = seen.get(path, 0) + 1
    return tuple(units)


def choose_cuts(
    graph: Graph, units: Sequence[Unit], num_stages: int, named: Sequence[str] = (), chosen: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Give the first unit of each stage after the first: at the named modules, as a plan chose, or balanced by cost.

    Raises CaptureError when the model has fewer units than stages, or a named cut is not possible.
    """
    if graph.blocked:
        raise CaptureError(
            f"the model cannot be cut into {num_stages} stages: {graph.blocked}. "
            "It still trains under dp; or move that code into a submodule of its own, so that the rest can be cut."
        )
    if named:
        return _named_cuts(units, num_stages, named)
    if len(units) == num_stages:
        return tuple(range(1, num_stages))
    if chosen is not None and len(chosen) == num_stages - 1 and max(chosen, default=0) < len(units):
        return tuple(chosen)
    if len(units) < num_stages:
        why = "; ".join(f'"{path}" runs as a whole because {why}' for path, why in graph.opaque.items())
        raise CaptureError(
            f"the layout asks for {num_stages} stages (pp x virtual), but the model has only {len(units)} units that "
            f"can be parted{': ' + why if why else ''}. Use at most pp={len(units)}, "
            "or a schedule with one stage a device."
        )
    cuts = best_cuts([u.cost for u in units], num_stages)
    assert cuts is not None  # there are units enough
    return cuts


def _named_cuts(units: Sequence[Unit], num_stages: int, named: Sequence[str]) -> tuple[int, ...]:
    if len(named) != num_stages - 1:
        raise CaptureError(
            f"cuts={list(named)!r} makes {len(named) + 1} stages, but the layout asks for {num_stages}; "
            f"name {num_stages - 1} modules at which a stage begins."
        )
    cuts = []
    for name in named:
        found = next((u.index for u in units if u.key[0] == name or u.key[0].startswith(f"{name}.")), None)
        if not found:
            begins = ", ".join(dict.fromkeys(u.key[0] for u in units[1:]))
            raise CaptureError(f"cuts: no stage can begin at {name!r}; it can at: {begins}.")
        cuts.append(found)
    if sorted(set(cuts)) != cuts:
        raise CaptureError(f"cuts={list(named)!r} are not in the order in which the model runs them.")
    return tuple(cuts)
