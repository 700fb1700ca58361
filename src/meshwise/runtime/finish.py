"""The end of a step: sums of gradients, tied weights, norm, clipping, update."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..grid import split_evenly
from ..parallel.reduce import Reducer
from ..parallel.shared_reduce import SharedReducer
from ..parallel.transport import wait_for
from ..schedule.actions import Op
from .buffers import commit_buffers
from .commons import site_position
from .step import StepResult
from .update import block_norms, clip_grads, combine_blocks, combine_norms, cut_blocks, norms_of, run_hooks

if TYPE_CHECKING:
    from .engine import Engine

Steps = Generator[None, None, Any]
TIE_TAG = 1 << 22


def finish_step(engine: Engine) -> Generator[None, None, StepResult]:
    """Finish a step on one rank: every rank of the mesh does it together."""
    begun = time.perf_counter()
    yield from engine.gradients.wait_for_replicas()
    shared = engine.commons.active
    if isinstance(engine.gradients.reducer, SharedReducer):
        engine.gradients.reducer.launch_rest()
    engine.losses.post()
    if not shared and not engine.gradients.in_place:
        yield from _sum_buckets(engine)
    losses, measures = yield from engine.losses.gather()
    fine = engine.losses.check(losses)
    norm = None
    if fine and shared:
        norm = yield from _update_shared(engine, _scale(engine, measures), begun)
    elif fine:
        yield from _set_grads(engine, _scale(engine, measures))
        run_hooks(engine.hooks)
        begun = engine.noted(Op.REDUCE, begun)
        norm = yield from _clip(engine)
        begun = engine.noted(Op.CLIP, begun)
        _update(engine)
        begun = engine.noted(Op.UPDATE, begun)
        yield from commit_buffers(engine)
    return StepResult(
        step=engine.step_index,
        loss=_total_loss(engine, losses, measures),
        grad_norm=norm,
        num_samples=engine.batch.num_samples,
        losses=tuple(losses),
        skipped=not fine,
        ids=engine.batch.ids,
    )


def _update_shared(engine: Engine, factor: float, begun: float) -> Generator[None, None, float | None]:
    """Add up and update this rank's share, all replicas' gradients being in their rows (their losses are here)."""
    commons, group = engine.commons, engine.commons.reach.here
    sums = yield from commons.fold(factor)
    commons.show_gradients()
    begun = engine.noted(Op.REDUCE, begun)
    norm = None
    if engine.job.clip_grad_norm is not None:
        yield from wait_for(engine.transport.meet(group))
        norm = yield from _shared_norm(engine)
        if sums:
            clip_grads(sums, norm, engine.job.clip_grad_norm)
    begun = engine.noted(Op.CLIP, begun)
    changed = commons.take_changes()
    commons.update()
    if engine.scheduler is not None:
        engine.scheduler.step()
    begun = engine.noted(Op.UPDATE, begun)
    yield from commit_buffers(engine)
    yield from wait_for(engine.transport.meet(group))
    commons.shared.forget(changed)
    commons.shared.mark_updated()
    return norm


def _shared_norm(engine: Engine) -> Generator[None, None, float]:
    """Give the one true norm; each replica takes a part of the blocks."""
    kind, group = engine.job.clip_norm_type, engine.commons.reach.here
    named = [(n, p.grad) for n, p in engine.parameters.items() if p.grad is not None]
    blocks, counts = cut_blocks([g for _, g in named])
    parts = split_evenly(len(blocks), len(group))
    low, high = parts[group.index(engine.transport.rank)]
    rows = torch.zeros(-(-len(blocks) // len(group)), dtype=torch.float64)
    if low < high:
        rows[: high - low] = norms_of(blocks[low:high], kind)
    members = yield from wait_for(engine.transport.all_gather(rows, group))
    found = [x for told, (a, b) in zip(members, parts, strict=True) for x in told[: b - a].tolist()]
    norms = dict(zip([n for n, _ in named], combine_blocks(found, counts, kind), strict=True))
    if len(engine.pp_group) > 1:
        norms = yield from _tell_norms(engine, norms)
    return combine_norms([norms[n] for n in engine.parameters if n in norms], kind)


def _sum_buckets(engine: Engine) -> Steps:
    reducer = engine.gradients.reducer
    assert isinstance(reducer, Reducer)
    sums = yield from reducer.finish()
    for bucket, grads in zip(reducer.buckets, sums, strict=True):
        for site, grad in zip(bucket.sites, grads, strict=True):
            engine.gradients.sums[engine.gradients.sites[site]] = grad


def _scale(engine: Engine, measures: list[float]) -> float:
    """Give the factor that turns "share of what a sample usually measures" to "share of what was measured"."""
    if not engine.weigher.needs_data or engine.weigher.kind in ("sum", "batch"):
        return 1.0
    total, usual = sum(measures), engine.weigher.per_sample * engine.batch.num_samples
    return 1.0 if total == usual or total == 0 else usual / total


def _total_loss(engine: Engine, losses: list[float], measures: list[float]) -> float:
    if engine.weigher.kind == "batch" or len(losses) == 1:
        return losses[0]
    if engine.weigher.kind == "sum":
        return sum(losses)
    pairs = [(x, w) for x, w in zip(losses, measures, strict=True) if w != 0]
    total = sum(w for _, w in pairs)
    return sum(x * w for x, w in pairs) / total if total else 0.0


# ---- parameters with several sites -------------------------------------------------------------


def _set_grads(engine: Engine, factor: float) -> Steps:
    """Put the whole gradient of each parameter in its ``.grad``: its sites added up, last used first."""
    by_name: dict[str, Tensor | None]
    tied = [(n, h) for n, h in holders(engine).items() if len(h) > 1] if engine.layout.pp > 1 else []
    by_name = {site[0]: grad for (_, site), grad in engine.gradients.sums.items()}
    if tied or len(by_name) < len(engine.gradients.sums):
        by_name = yield from _add_sites(engine, tied)
    for name, grad in by_name.items():
        engine.parameters[name].grad = grad
    if factor != 1.0:
        grads = [p.grad for p in engine.parameters.values() if p.grad is not None]
        torch._foreach_mul_([g for g in grads if not g.is_sparse], factor)
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor)


def _add_sites(engine: Engine, tied: list[tuple[str, list[int]]]) -> Steps:
    """Add up the gradients of parameters with several sites, here or on several pipeline ranks."""
    by_name: dict[str, list[tuple[int, Tensor | None]]] = {}
    for (_, site), grad in engine.gradients.sums.items():
        by_name.setdefault(site[0], []).append((site_position(engine.staged, site), grad))
    yield from _exchange_ties(engine, by_name, tied)
    return {name: _fold_sites(parts) for name, parts in by_name.items()}


def _fold_sites(parts: list[tuple[int, Tensor | None]]) -> Tensor | None:
    total: Tensor | None = None
    for _, grad in sorted(parts, key=lambda p: -p[0]):
        if grad is not None:
            total = grad if total is None else total + grad
    return total


def holders(engine: Engine) -> dict[str, list[int]]:
    """Give the pipeline ranks (pp index) that hold each parameter some capture has used, the owner first."""
    placed = engine.book.placed
    return {name: placed.ranks(name) for name in placed.params}


def _exchange_ties(
    engine: Engine, by_name: dict[str, list[tuple[int, Tensor | None]]], tied: list[tuple[str, list[int]]]
) -> Steps:
    mine = [(i, n, h) for i, (n, h) in enumerate(tied) if engine.pp_index in h and n in by_name]
    for i, name, ranks in mine:
        parts = sorted(by_name[name], key=lambda p: p[0])
        for other in ranks:
            if other != engine.pp_index:
                peer = engine.mesh.rank(dp=engine.dp_index, pp=other)
                tag = TIE_TAG + 2 * (i * engine.layout.pp + engine.pp_index) + (other < engine.pp_index)
                engine.courier.send(tuple(g for _, g in parts), peer, tag, ("tie", name, other), static=False)
    for i, name, ranks in mine:
        for other in ranks:
            if other != engine.pp_index:
                peer = engine.mesh.rank(dp=engine.dp_index, pp=other)
                tag = TIE_TAG + 2 * (i * engine.layout.pp + other) + (engine.pp_index < other)
                grads = yield from engine.courier.receive(peer, tag, ("tie", name, other), static=False)
                by_name[name] += zip(_positions(engine, name, other), grads, strict=True)


def _positions(engine: Engine, name: str, pp_index: int) -> list[int]:
    stages = [s for s in range(engine.layout.num_stages) if s % engine.layout.pp == pp_index]
    sites = [site for s in stages for site in engine.staged.sites(s) if site[0] == name]
    return sorted(site_position(engine.staged, site) for site in sites)


# ---- norm, update --------------------------------------------------------------------------------


def _clip(engine: Engine) -> Steps:
    """Clip by the one true norm: each parameter counted once, on all ranks the same number."""
    limit, kind = engine.job.clip_grad_norm, engine.job.clip_norm_type
    if limit is None:
        return None
    named = [(n, p) for n, p in engine.parameters.items() if p.grad is not None]
    owner = {name: ranks[0] for name, ranks in holders(engine).items()}
    mine = [(n, p.grad) for n, p in named if owner.get(n, engine.pp_index) == engine.pp_index]
    norms = dict(
        zip([n for n, _ in mine], block_norms([g for _, g in mine if g is not None], kind), strict=True)
    )
    if len(engine.pp_group) > 1:
        norms = yield from _tell_norms(engine, norms)
    ordered = [norms[n] for n in engine.parameters if n in norms]
    norm = combine_norms(ordered, kind)
    grads = [p.grad for _, p in named if p.grad is not None]
    if grads:
        clip_grads(grads, norm, limit)
    return norm


def _tell_norms(engine: Engine, norms: dict[str, float]) -> Steps:
    """Give the norms of all pipeline ranks' parameters to each of them."""
    rows = [(1.0, norms[name]) if name in norms else (0.0, 0.0) for name in engine.parameters]
    table = torch.tensor(rows, dtype=torch.float64).to(engine.device)
    members = yield from wait_for(engine.transport.all_gather(table, engine.pp_group))
    return {
        name: norm
        for member in members
        for name, (held, norm) in zip(engine.parameters, member.tolist(), strict=True)
        if held
    }


def _update(engine: Engine) -> None:
    engine.fused.step()
    if engine.scheduler is not None:
        engine.scheduler.step()


__all__ = ["finish_step", "holders", "site_position"]
