"""Run the coupled rows of a step: gather over the replicas, fold in tree order, hand back."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..grid import tree_fold
from ..model.graph import Input, Value
from ..parallel.transport import wait_for
from ..tree import leaves, map_leaves, replace_leaves
from .cells import Values
from .coupled import batch_moments, correct_gradient, fold_moments, gather_rows, running_update

if TYPE_CHECKING:
    from .engine import Engine

Steps = Generator[None, None, Any]


def couple_forward(engine: Engine, stage: int, k: int) -> Steps:
    """Take the statistics of the row between segments ``k`` and ``k + 1`` over the whole batch."""
    state = engine.first_state(stage)
    row = state.segments[k + 1].row
    assert row is not None
    local = torch.zeros((0, 1 + 2 * row.channels), dtype=torch.float64, device=engine.device)
    if engine.local:
        xs = [_row_input(engine, stage, k, m) for m in engine.local]
        local = torch.stack([batch_moments(x.detach()) for x in xs])
    # nothing may stay switched (autograd off, say) over a yield: another rank may run in this process
    rows = yield from gather_rows(engine.transport, engine.dp_group, local, engine.share.counts)
    engine.rows[stage, k] = fold_moments(rows, row.eps)
    _update_running(engine, state, row, engine.rows[stage, k])


def _row_input(engine: Engine, stage: int, k: int, m: int) -> Tensor:
    """Give what a row normalizes of microbatch ``m``: a value that the segment before gave, or a batch leaf."""
    data, _, state = engine.state(stage, m)
    row = state.segments[k + 1].row
    assert row is not None and isinstance(row.input, (Value, Input))
    if isinstance(row.input, Input):
        found = engine.book.inputs(data)[row.input.index]
    else:
        found = engine.cells[stage, m, k].gives[state.segments[k].gives.index(row.input.index)]
    assert isinstance(found, Tensor)
    return found


def _update_running(engine: Engine, state: Any, row: Any, statistics: Any) -> None:
    if row.running_mean is None or row.running_var is None:
        return
    names = (row.running_mean.name, row.running_var.name)
    before = [state.candidates.get(n, None) for n in names]
    old = [b if b is not None else state.buffer_of(n) for b, n in zip(before, names, strict=True)]
    mean, var = running_update(row, statistics, old[0], old[1])
    state.candidates[names[0]], state.candidates[names[1]] = mean, var


def couple_backward(engine: Engine, stage: int, k: int) -> Steps:
    """Correct the gradients that cross a row backward by what the statistics add to them."""
    state = engine.first_state(stage)
    segment = state.segments[k + 1]
    row, statistics = segment.row, engine.rows[stage, k]
    assert row is not None and segment.row_sites is not None
    if not isinstance(row.input, Value):
        return  # the batch itself wants no gradient
    at = state.segments[k].gives.index(row.input.index)
    channels = row.channels
    sums = engine.gradients.row_sums.get((stage, k), {})
    local = torch.zeros((0, 2 * channels), dtype=torch.float64, device=engine.device)
    if engine.local:
        local = torch.stack([_sum_pair(sums.get(m), channels, engine.device) for m in engine.local])
    rows = yield from gather_rows(engine.transport, engine.dp_group, local, engine.share.counts)
    total = tree_fold(len(rows), {(m, m + 1): r for m, r in enumerate(rows)}, lambda a, b: a + b)
    weight = engine.tensors[segment.row_sites[0]].detach()
    for m in engine.local:
        grads = list(engine.incoming[stage, m, k])
        x = engine.cells[stage, m, k].gives[at]
        grad = grads[at]
        if grad is not None and x is not None:
            s2, s1 = total[:channels], total[channels:]
            grads[at] = correct_gradient(grad.detach(), x.detach(), statistics, weight, s1, s2)
        engine.incoming[stage, m, k] = tuple(grads)


def _sum_pair(pair: Any, channels: int, device: torch.device) -> Tensor:
    zero = torch.zeros(channels, dtype=torch.float64, device=device)
    parts = pair or [None, None]
    return torch.cat([zero if p is None else p for p in parts])


class WholeLoss:
    """Hold a loss taken over the whole batch: each microbatch's share of the gradient of what its last cell gave."""

    def __init__(self, grads: dict[int, Values]) -> None:
        self._grads = grads

    def grads(self, m: int) -> Values:
        """Give the gradients of what microbatch ``m``'s last segment gave."""
        return self._grads[m]


def couple_loss(engine: Engine) -> Steps:
    """Evaluate the loss on the outputs of the whole batch, gathered in microbatch order.

    Every replica computes it alike and keeps its own microbatches' part of the gradient.
    """
    stage = engine.layout.num_stages - 1
    k = len(engine.staged.stages[stage]) - 1
    outputs = {m: engine.cells[stage, m, k].whole for m in engine.local}
    mine = [
        ([_plain(t) for t in leaves(outputs[m])], [_plain(t) for t in leaves(engine.batch.microbatch(m))])
        for m in engine.local
    ]
    members = yield from wait_for(engine.transport.all_gather_object(mine, engine.dp_group))
    parts = [part for member in members for part in member]
    output_like = outputs[engine.local[0]] if engine.local else _output_structure(engine)
    data_like = engine.batch.microbatch(engine.first)
    whole_output, tensors = _join(output_like, [p[0] for p in parts], engine.batch.sizes, grad=True)
    whole_data, _ = _join(data_like, [p[1] for p in parts], engine.batch.sizes, grad=False)
    engine.seeder(1 << 30)(1 << 20)
    with torch.enable_grad(), engine.book.autocast():
        loss = engine.loss(whole_output, whole_data)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = dict(zip(map(id, wanted), torch.autograd.grad(loss, wanted, allow_unused=True), strict=True))
    whole_grads = [None if t is None else found.get(id(t)) for t in tensors]
    for m in engine.local:
        engine.losses.values[m] = loss.detach()
    engine.whole_loss = WholeLoss(
        {
            m: _by_gives(engine, m, _slice(whole_grads, engine.batch.sizes, m), outputs[m])
            for m in engine.local
        }
    )


def _by_gives(engine: Engine, m: int, grads: list[Tensor | None], output: Any) -> Values:
    """Put the gradients of the output's leaves in the order of the values the last segment gave."""
    staged = engine.capture(m)[1]
    if staged.graph.blocked:
        return tuple(g for g, leaf in zip(grads, leaves(output), strict=True) if isinstance(leaf, Tensor))
    found: dict[int, Tensor | None] = {}
    for leaf, grad in zip(leaves(staged.graph.output), grads, strict=True):
        if isinstance(leaf, Value) and grad is not None:
            before = found.get(leaf.index)
            found[leaf.index] = grad if before is None else before + grad
    return tuple(found.get(v) for v in staged.stages[-1][-1].gives)


def _output_structure(engine: Engine) -> Any:
    graph = engine.capture(0)[1].graph
    return map_leaves(lambda leaf: leaf, graph.output)


def _plain(leaf: Any) -> Any:
    return leaf.detach().contiguous() if isinstance(leaf, Tensor) else leaf


def _join(
    like: Any, parts: list[list[Any]], sizes: tuple[int, ...], *, grad: bool
) -> tuple[Any, list[Tensor | None]]:
    joined: list[Any] = []
    for column in zip(*parts, strict=True):
        first = column[0]
        batched = isinstance(first, Tensor) and first.ndim > 0 and first.shape[0] == sizes[0]
        value = torch.cat(column) if batched else first
        if grad and isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().requires_grad_()
        joined.append(value)
    return replace_leaves(like, joined), [t if isinstance(t, Tensor) else None for t in joined]


def _slice(grads: list[Tensor | None], sizes: tuple[int, ...], m: int) -> list[Tensor | None]:
    start = sum(sizes[:m])
    return [None if g is None else g[start : start + sizes[m]].contiguous() for g in grads]
