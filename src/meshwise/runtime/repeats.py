"""Find units that do just what an earlier one did (the layers of a deep model), so that each is counted once.

A unit repeats another when its code, what it calls, and the shapes of all it takes and uses are the same, and the unit
before it repeats the one before the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.codegen import Segment
from ..model.graph import Attribute, Constant, Graph, find_refs
from ..model.watch import storage_of
from .cells import Values

Meta = tuple[Any, ...] | None
NUMBERED = re.compile(r"\bv(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Given:
    """Say how a unit's output came about: passed on from ``source``-th input, or new, of this shape."""

    source: int | None
    meta: Meta
    saved: bool


def meta_of(tensor: Tensor | None) -> Meta:
    """Give what is to be the same of two tensors."""
    if tensor is None:
        return None
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


class Repeats:
    """Remember units by what they do."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.first: dict[Any, int] = {}  # what it and the unit before it do -> unit
        self.before: Any = None

    def find(self, unit: int, nodes: Sequence[Any], segment: Segment, takes: Values, leaves: Sequence[Meta]) -> int:
        """Give the unit that this one repeats: itself where it is the first of its kind."""
        mine = self._signature(nodes, segment, takes, leaves) if not self.graph.blocked else None
        key = None if mine is None or self.before is None else (self.before, mine)
        self.before = mine
        return unit if key is None else self.first.setdefault(key, unit)

    def _signature(self, nodes: Sequence[Any], segment: Segment, takes: Values, leaves: Sequence[Meta]) -> Any:
        refs = [r for node in nodes for r in find_refs((node.args, node.kwargs))]
        if segment.opaque or any(isinstance(r, (Attribute, Constant)) for r in refs):
            return None
        names: dict[str, str] = {}
        source = NUMBERED.sub(lambda found: names.setdefault(found.group(0), f"v_{len(names)}"), segment.source)
        called = {k: id(v) for k, v in segment.run.__globals__.items() if k not in ("segment", "__builtins__")}
        return source, tuple(sorted(called.items())), tuple(map(meta_of, takes)), tuple(leaves)


def given_by(takes: Values, gives: Values, saved: set[int | None]) -> tuple[Given, ...]:
    """Note how a unit's outputs came about."""
    places = {id(t): k for k, t in enumerate(takes) if t is not None}
    storages = {storage_of(t): k for k, t in enumerate(takes) if t is not None}
    return tuple(
        Given(
            source=None if t is None else places.get(id(t), storages.get(storage_of(t))),
            meta=meta_of(t),
            saved=t is not None and storage_of(t) in saved,
        )
        for t in gives
    )


def give_again(given: Sequence[Given], takes: Values, saved: set[int | None]) -> Values:
    """Make outputs like those of the unit that is repeated."""
    made: list[Tensor | None] = []
    for each in given:
        if each.meta is None:
            made.append(None)
            continue
        shape, stride, dtype, requires_grad = each.meta
        source = None if each.source is None else takes[each.source]
        if source is not None and meta_of(source) == each.meta:
            tensor = source
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype).requires_grad_(requires_grad)
        if each.saved:
            saved.add(storage_of(tensor))
        made.append(tensor)
    return tuple(made)
