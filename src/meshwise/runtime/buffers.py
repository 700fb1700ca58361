"""Buffers at the end of a step: the same on all replicas, changed once, in microbatch order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..parallel.transport import wait_for
from .cells import StageState, split_prefix
from .step import mixed_step

if TYPE_CHECKING:
    from .engine import Engine

Steps = Generator[None, None, Any]
Changed = dict[str, Tensor]


def commit_buffers(engine: Engine) -> Steps:
    """Give buffers the value that the step's last microbatch left, the same on all replicas."""
    compares = engine.compares_buffers and len(engine.dp_group) > 1
    if not compares and all(staged.keeps_buffers for _, staged, _ in engine.captures.values()):
        return
    states = [s for by_stage in engine.states.values() for s in by_stage.values() if id(s) in engine.begun]
    changed: Changed = {}
    for state in states:
        changed.update(state.candidates)
    yield from _fold_statistics(engine, changed)
    if len(engine.dp_group) > 1:
        yield from _agree(engine, states, changed)
    if changed:
        _write_all(engine, changed)


# ---- replicas ------------------------------------------------------------------------------------


def _agree(engine: Engine, states: list[StageState], changed: Changed) -> Steps:
    """Take the values of the last replica where replicas may differ, or where that is not known yet."""
    rows = {b.name for row in _coupled_rows(states) for b in (row.running_mean, row.running_var) if b}
    opaque = any(st.staged.graph.opaque or st.staged.graph.blocked for st in states)
    unlike = engine.unlike_buffers.union(*(st.staged.data_buffers for st in states)) if changed else set()
    idle = engine.share.has_idle and _has_changes(engine)
    first, engine.compares_buffers = engine.compares_buffers, False
    if not (opaque or idle or first or not unlike.isdisjoint(changed.keys() - rows)):
        return
    wanted = {k: v for k, v in changed.items() if k not in rows}
    members = yield from wait_for(engine.transport.all_gather_object(wanted, engine.dp_group))
    last = next(m for m, n in zip(members[::-1], engine.share.counts[::-1], strict=True) if n)
    engine.unlike_buffers |= {k for m in members for k, v in m.items() if not _same_bits(v, last.get(k))}
    changed.update(last)


def _coupled_rows(states: Iterable[StageState]) -> list[Any]:
    return [segment.row for state in states for segment in state.segments if segment.row]


def _same_bits(a: Tensor, b: Tensor | None) -> bool:
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def _has_changes(engine: Engine) -> bool:
    states = engine.capture(engine.first)[2].values()
    return any(segment.changes or segment.rebinds for state in states for segment in state.segments)


# ---- running statistics of batch_norm="microbatch" ---------------------------------------------------


def _fold_statistics(engine: Engine, changed: Changed) -> Steps:
    """Fold the statistics of each microbatch in the running ones, in microbatch order, many rows at once."""
    states = {m: engine.capture(m)[2] for m in engine.local or [0]}
    plan = _plan(next(iter(states.values())))
    if any(_plan(other) != plan for other in list(states.values())[1:]):
        raise mixed_step(engine.step_index)
    for (momentum, _, _), places in plan.items():
        own = [
            _flat(t for s, k, n, _ in places for t in states[m][s].statistics[m, k, n]) for m in engine.local
        ]
        names = [name for *_, pair in places for name in pair]
        starts = [changed[n] if n in changed else engine.model.get_buffer(n) for n in names]
        flat = _flat(starts)
        for found in (yield from _of_all_replicas(engine, own, flat)):
            flat = flat * (1 - momentum) + found * momentum
        parts = flat.split([t.numel() for t in starts])  # type: ignore[no-untyped-call]
        changed.update({n: p.view(t.shape) for n, p, t in zip(names, parts, starts, strict=True)})


Place = tuple[
    int, int, int, tuple[str, str]
]  # stage, segment, number in the segment; names of mean and variance


def _plan(states: dict[int, StageState]) -> dict[tuple[float, torch.dtype, int], list[Place]]:
    """Group the rows that are folded alike; a BatchNorm called again comes in a later group."""
    plan: dict[tuple[float, torch.dtype, int], list[Place]] = {}
    calls: Counter[str] = Counter()
    for stage, state in states.items():
        for k, segment in enumerate(state.segments):
            for n, row in enumerate(segment.statistics):
                assert row.running_mean is not None and row.running_var is not None
                names = (row.running_mean.name, row.running_var.name)
                key = (row.momentum, state.buffer_of(names[0]).dtype, calls[names[0]])
                calls[names[0]] += 1
                plan.setdefault(key, []).append((stage, k, n, names))
    return plan


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _of_all_replicas(engine: Engine, own: list[Tensor], like: Tensor) -> Steps:
    """List the statistics of all microbatches of the step, in order; each is as long as ``like``."""
    if len(engine.dp_group) == 1:
        return own
    table = like.new_zeros((max(engine.share.counts), like.numel()))
    for row, found in zip(table, own, strict=False):
        row.copy_(found)
    members = yield from wait_for(engine.transport.all_gather(table, engine.dp_group))
    return [row for part, n in zip(members, engine.share.counts, strict=True) for row in part[:n]]


# ---- writing -----------------------------------------------------------------------------------------


def _write_all(engine: Engine, changed: Changed) -> None:
    """Write values into the buffers where they fit, else put new buffers in their place."""
    into: list[Tensor] = []
    values: list[Tensor] = []
    for name, value in changed.items():
        path, last = split_prefix(name)
        module = engine.model.get_submodule(path)
        current = module._buffers.get(last)
        if current is not None and current.shape == value.shape and current.dtype == value.dtype:
            into.append(current)
            values.append(value.detach())
        else:
            module._buffers[last] = value.detach().clone()
    if into:
        with torch.no_grad():
            torch._foreach_copy_(into, values)
