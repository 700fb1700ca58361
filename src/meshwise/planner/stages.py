"""Where to cut: the contiguous cut whose slowest stage is fastest, among those whose stages fit in memory.

Exact dynamic programming over (number of stages, last unit)::

    best[k][b] = min over a of  max(best[k-1][a], cost(a, b))        for a stage [a, b) that fits as stage k-1

A stage's cost is its cells on one microbatch and what it hands on; ties go to less handed on, then to earlier cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..cost.stage import StageTable

Fits = Callable[[int, int, int], bool]  # (stage, first, last): may it hold these units?


def best_cuts(
    costs: Sequence[float],
    num_stages: int,
    *,
    handed: Sequence[float] = (),
    fits: Fits | None = None,
    legal: Sequence[bool] = (),
) -> tuple[int, ...] | None:
    """Cut a row of unit costs in ``num_stages`` runs; None where no cut fits.

    ``handed[u]`` is what handing on behind unit ``u`` costs (the stage before and the stage behind pay it each).
    ``legal[u]``: whether a stage may begin with unit ``u``. Gives the first unit of stages 1.. .
    """
    total = len(costs)
    if num_stages > total:
        return None
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    border = np.concatenate([[0.0], np.asarray(handed, dtype=float) if len(handed) else np.zeros(total)])
    border[total] = 0.0
    best = np.full((num_stages + 1, total + 1), np.inf)
    moved = np.full((num_stages + 1, total + 1), np.inf)
    chosen = np.zeros((num_stages + 1, total + 1), dtype=int)
    best[0, 0] = moved[0, 0] = 0.0
    for k in range(1, num_stages + 1):
        for stop in range(k, total - (num_stages - k) + 1):
            starts = np.arange(k - 1, stop)
            found = _best_start(
                starts, stop, prefix, border, best[k - 1], moved[k - 1], _allowed(k - 1, starts, stop, fits, legal)
            )
            if found is not None:
                at, best[k, stop], moved[k, stop] = found
                chosen[k, stop] = at
    if not np.isfinite(best[num_stages, total]):
        return None
    cuts, stop = [], total
    for k in range(num_stages, 1, -1):
        stop = int(chosen[k, stop])
        cuts.append(stop)
    return tuple(reversed(cuts))


def _allowed(stage: int, starts: np.ndarray, stop: int, fits: Fits | None, legal: Sequence[bool]) -> np.ndarray | None:
    """Mark the starts from which a stage that ends before ``stop`` may run."""
    if fits is None and not len(legal):
        return None
    marks = np.ones(len(starts), dtype=bool)
    for k, start in enumerate(starts):
        lawful = start == 0 or not len(legal) or legal[start]
        marks[k] = lawful and (fits is None or fits(stage, int(start), stop))
    return marks


def _best_start(
    starts: np.ndarray,
    stop: int,
    prefix: np.ndarray,
    border: np.ndarray,
    best: np.ndarray,
    moved: np.ndarray,
    allowed: np.ndarray | None,
) -> tuple[int, float, float] | None:
    """Find the start of the last stage that makes the slowest stage fastest."""
    costs = np.maximum(best[starts], prefix[stop] - prefix[starts] + border[starts] + border[stop])
    if allowed is not None:
        costs = np.where(allowed, costs, np.inf)
    least = costs.min()
    if not np.isfinite(least):
        return None
    ties = np.flatnonzero(costs <= least * (1 + 1e-12))
    at = ties[np.argmin(moved[starts[ties]])]
    start = int(starts[at])
    return start, float(least), float(moved[start] + border[stop])


def cut_by_cost(
    table: StageTable, num_stages: int, *, handed: Sequence[float] = (), fits: Fits | None = None
) -> tuple[int, ...] | None:
    """Cut a profile's units by their priced seconds."""
    costs = [table.seconds(u, u + 1) for u in range(len(table.units))]
    return best_cuts(costs, num_stages, handed=handed, fits=fits)


def improved(
    cuts: tuple[int, ...], num_units: int, seconds: Callable[[tuple[int, ...]], float], *, rounds: int = 4
) -> tuple[int, ...]:
    """Move single cuts by one unit while the replayed step gets faster: what the slowest stage alone does not show."""
    best, least = cuts, seconds(cuts)
    for _ in range(rounds):
        moves = [m for m in _neighbours(best, num_units)]
        timed = sorted((seconds(m), m) for m in moves)
        if not timed or timed[0][0] >= least * (1 - 1e-9):
            return best
        least, best = timed[0]
    return best


def _neighbours(cuts: tuple[int, ...], num_units: int) -> list[tuple[int, ...]]:
    found = []
    for k, cut in enumerate(cuts):
        for moved in (cut - 1, cut + 1):
            low = cuts[k - 1] if k else 0
            high = cuts[k + 1] if k + 1 < len(cuts) else num_units
            if low < moved < high:
                found.append((*cuts[:k], moved, *cuts[k + 1 :]))
    return found
