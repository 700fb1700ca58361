"""Where to cut: the contiguous cut whose slowest stage is fastest, among those whose stages fit in memory.

Exact dynamic programming over (number of stages, last unit)::

    best[k][b] = min over a of  max(best[k-1][a], cost(a, b))        for a stage [a, b) that fits as stage k-1

A stage's cost is its cells on one microbatch and what it hands on; ties go to less handed on, then to earlier cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

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
    slowest, handed_on = _run_costs(costs, handed)
    best = np.full((num_stages + 1, total + 1), np.inf)
    moved = np.full((num_stages + 1, total + 1), np.inf)
    chosen = np.zeros((num_stages + 1, total + 1), dtype=int)
    best[0, 0] = moved[0, 0] = 0.0
    for k in range(1, num_stages + 1):
        found = np.maximum(best[k - 1][:, None], slowest)  # [start, stop]
        if fits is not None or len(legal):
            found = np.where(_allowed(k - 1, num_stages, found, fits, legal), found, np.inf)
        best[k] = found.min(axis=0)
        ties = found <= best[k] * (1 + 1e-12)
        further = np.where(ties & np.isfinite(found), moved[k - 1][:, None], np.inf)
        chosen[k] = further.argmin(axis=0)
        moved[k] = further.min(axis=0) + handed_on
    if not np.isfinite(best[num_stages, total]):
        return None
    cuts, stop = [], total
    for k in range(num_stages, 1, -1):
        stop = int(chosen[k, stop])
        cuts.append(stop)
    return tuple(reversed(cuts))


def _run_costs(costs: Sequence[float], handed: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Give what a stage [start, stop) takes, infinite where that is none, and what is handed on behind each unit."""
    total = len(costs)
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    border = np.concatenate([[0.0], np.asarray(handed, dtype=float) if len(handed) else np.zeros(total)])
    border[total] = 0.0
    table = prefix[None, :] - prefix[:, None] + border[:, None] + border[None, :]
    table[np.tril_indices(total + 1)] = np.inf  # a stage holds one unit at least
    return table, border


def _allowed(stage: int, num_stages: int, found: np.ndarray, fits: Fits | None, legal: Sequence[bool]) -> np.ndarray:
    """Mark the runs of units that a stage may hold, among those that are still of use."""
    marks: np.ndarray = np.isfinite(found)
    total = len(found) - 1
    for start, stop in np.argwhere(marks):
        lawful = start == 0 or not len(legal) or legal[start]
        room = stop <= total - (num_stages - stage - 1)  # the stages behind need a unit each
        marks[start, stop] = lawful and room and (fits is None or fits(stage, int(start), int(stop)))
    return marks


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
