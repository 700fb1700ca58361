"""Compare predictions with what was measured: errors, ranks within sweeps, and what one constant would have given."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .counting import Unknown
from .predict import Prediction, predict
from .rows import Row


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Hold one row and its prediction; ``measured`` is seconds of a step, None where only memory was measured."""

    row: Row
    prediction: Prediction
    measured: float | None

    @property
    def time_error(self) -> float | None:
        """Give the relative error of time."""
        return None if self.measured is None else self.prediction.seconds / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        """Give the relative error of memory."""
        return None if self.row.memory is None else self.prediction.num_bytes / self.row.memory - 1


def compare(row: Row) -> Compared:
    """Predict a row. Raises Unknown where it cannot be rebuilt."""
    if row.failed:
        raise Unknown("the run failed")
    found = predict(row)
    return Compared(row=row, prediction=found, measured=measured_seconds(row, found))


def measured_seconds(row: Row, found: Prediction) -> float | None:
    """Give the seconds of a step from whatever the source states."""
    if row.seconds:
        return row.seconds
    if row.samples and row.global_batch:
        return row.global_batch / row.samples
    if row.tokens_per_device and row.seq:
        return found.tokens / (row.tokens_per_device * row.gpus)
    if row.flops and row.params and row.seq:
        return model_flops(row, found.tokens) / (row.flops * row.gpus)
    return None


def model_flops(row: Row, tokens: float) -> float:
    """Give the FLOPs of a step without recompute: 6 N + 12 L s h for each token."""
    return tokens * (6 * row.params + 12 * row.layers * row.seq * row.hidden)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Give Spearman's rank correlation; None for fewer than three."""
    if len(pairs) < 3:
        return None
    ranks = [_ranks([p[k] for p in pairs]) for k in (0, 1)]
    if min(statistics.pstdev(r) for r in ranks) == 0:
        return None
    return statistics.correlation(ranks[0], ranks[1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Give ranks; equal values share one."""
    order = sorted(values)
    return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]


def sweeps(compared: Sequence[Compared]) -> list[list[Compared]]:
    """Group the runs that differ in their layout alone."""
    groups: dict[object, list[Compared]] = {}
    for c in compared:
        r = c.row
        key = (r.set, r.model, r.seq, r.gpu, r.gpus, r.global_batch, r.precision, r.framework, r.notes if "cnn" in
               r.family else "")  # fmt: skip
        groups.setdefault(key, []).append(c)
    return [g for g in groups.values() if len({_layout(c.row) for c in g}) >= 3]


def _layout(row: Row) -> tuple[object, ...]:
    return row.tp, row.pp, row.dp, row.micro_batch, row.act_ckpt


def constant_errors(compared: Sequence[Compared], work: Callable[[Compared], float]) -> list[float]:
    """Give the errors of the best constant rate: one efficiency for the whole source, fitted to it."""
    rates = [work(c) / c.measured for c in compared if c.measured]
    middle = statistics.median(rates)
    return [abs(work(c) / middle / c.measured - 1) for c in compared if c.measured]


def typical(errors: Sequence[float]) -> float | None:
    """Give the median absolute error."""
    return statistics.median(map(abs, errors)) if errors else None
