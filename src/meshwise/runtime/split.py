"""Split a backward in the part earlier stages wait for and the part only parameters wait for.

Nodes of the autograd graph on a path from the outputs to the boundary inputs run in the first part; what
flows into those of them that also lead to parameters is kept. In the second part each such node runs again
towards its parameters alone, with the same kernels on the same operands, so the bits are those of a whole
backward. A leaf reached from several such nodes gets its parts in the order of a whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Finish = Callable[[], list[Tensor | None]]


def split_backward(
    outs: Sequence[Tensor],
    out_grads: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    leaves: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], Finish]:
    """Give the gradients of ``wanted`` now, and a function that gives those of ``leaves`` later."""
    start = [o.grad_fn for o in outs if o.grad_fn is not None]
    targets = {_accumulator(t) for t in wanted}
    accumulators = {_accumulator(t): i for i, t in enumerate(leaves)}
    on_path, order = _on_path(start, targets)
    forks = [n for n in order if n in on_path and _side_edges(n, on_path, targets)]
    simple = all(
        _leads_to_leaf_only(edge[0], on_path) for n in forks for edge in _side_edges(n, on_path, targets)
    )
    several = {
        n for node in order for n, i in node.next_functions if i != 0
    }  # not from a node's first output
    if not simple or several & set(forks) or not _each_leaf_once(forks, accumulators):
        found = torch.autograd.grad(outs, [*wanted, *leaves], out_grads, allow_unused=True)
        return found[: len(wanted)], lambda: list(found[len(wanted) :])
    return _split(outs, out_grads, wanted, leaves, forks)


def _split(
    outs: Any, out_grads: Any, wanted: Any, leaves: Any, forks: list[Any]
) -> tuple[tuple[Tensor | None, ...], Finish]:
    edges = [GradientEdge(n, 0) for n in forks]
    found = torch.autograd.grad(outs, [*wanted, *edges], out_grads, allow_unused=True, retain_graph=True)
    kept = [(e, g) for e, g in zip(edges, found[len(wanted) :], strict=True) if g is not None]

    def finish() -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * len(leaves)
        index = {_accumulator(t): i for i, t in enumerate(leaves)}
        for edge, grad in kept:
            mine = [index[a] for a in dict.fromkeys(_reach(edge.node)) if a in index]
            parts = torch.autograd.grad(
                [edge], [leaves[i] for i in mine], [grad], allow_unused=True, retain_graph=True
            )
            for i, part in zip(mine, parts, strict=True):
                grads[i] = part
        return grads

    return found[: len(wanted)], finish


def _reach(node: Any) -> list[Any]:
    """List the accumulators a fork's own side edges lead to."""
    found = []
    for after, _ in node.next_functions:
        while after is not None and not hasattr(after, "variable"):
            followers = [n for n, _ in after.next_functions if n is not None]
            after = followers[0] if len(followers) == 1 else None
        if after is not None:
            found.append(after)
    return found


def _accumulator(leaf: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _on_path(start: Sequence[Any], targets: set[Any]) -> tuple[set[Any], list[Any]]:
    """Find the nodes that lead from the outputs to ``targets``, and all nodes with outputs first."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(n, False) for n in start]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((n, False) for n, _ in node.next_functions if n is not None)
    on_path: set[Any] = set(targets)
    for node in order:  # children before parents
        if any(n in on_path for n, _ in node.next_functions):
            on_path.add(node)
    return on_path, order[::-1]


def _side_edges(node: Any, on_path: set[Any], targets: set[Any]) -> list[Any]:
    if node in targets:
        return []
    return [(n, i) for n, i in node.next_functions if n is not None and n not in on_path]


def _leads_to_leaf_only(node: Any, on_path: set[Any]) -> bool:
    """Tell whether a side branch is a plain chain to one leaf (a weight, or a view of one)."""
    while not hasattr(node, "variable"):
        followers = [n for n, _ in node.next_functions if n is not None]
        if len(followers) != 1 or followers[0] in on_path:
            return False
        node = followers[0]
    return True


def _each_leaf_once(forks: list[Any], accumulators: dict[Any, int]) -> bool:
    count: dict[Any, int] = {}
    for fork in forks:
        for node in _reach(fork):
            if node in accumulators:
                count[node] = count.get(node, 0) + 1
    return all(c == 1 for c in count.values())
