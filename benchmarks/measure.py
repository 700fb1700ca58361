"""Measure contenders block after block in turns, in the same processes, and compare their medians.

::

    warm-up   A B    A B  B A  A B  B A  A B     blocks of steps; a barrier before and after each

Noise that lasts longer than a block hits both sides alike, so ratios are steadier than seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

Run = Callable[[int], None]  # run this many steps


@dataclass(frozen=True, kw_only=True)
class Effort:
    """State how long to measure: blocks for each contender, and the least seconds of a block."""

    blocks: int = 7
    seconds: float = 1.0
    warm_steps: int = 3

    @classmethod
    def quick(cls) -> Effort:
        """Give the least effort that gives numbers at all."""
        return cls(blocks=5, seconds=0.05, warm_steps=2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one comparison: seconds a step of both sides (of each block) and the target of their ratio."""

    part: str
    case: str
    meshwise: str
    alternative: str
    seconds: tuple[float, ...]
    alternative_seconds: tuple[float, ...]
    target: float

    @property
    def ratio(self) -> float:
        """Give the ratio of the medians: meshwise / alternative."""
        return statistics.median(self.seconds) / statistics.median(self.alternative_seconds)

    @property
    def best(self) -> float:
        """Give the ratio of the fastest blocks, which outside load disturbs least."""
        return min(self.seconds) / min(self.alternative_seconds)

    @property
    def key(self) -> str:
        """Name the comparison."""
        return f"{self.part}/{self.case}/{self.meshwise} vs {self.alternative}"

    def as_dict(self) -> dict[str, object]:
        """Give the row as plain values, seconds a step included."""
        return {
            "key": self.key,
            "ratio": self.ratio,
            "best": self.best,
            "target": self.target,
            "median_seconds": statistics.median(self.seconds),
            "alternative_median_seconds": statistics.median(self.alternative_seconds),
            "seconds": list(self.seconds),
            "alternative_seconds": list(self.alternative_seconds),
        }

    def __str__(self) -> str:
        ours, theirs = (statistics.median(s) * 1e3 for s in (self.seconds, self.alternative_seconds))
        verdict = "ok" if self.ratio <= self.target else "OVER"
        name = f"{self.case}: {self.meshwise} / {self.alternative}"
        return (
            f"{self.part:11} {name:58} {ours:9.3f} ms {theirs:9.3f} ms  ratio {self.ratio:5.3f} "
            f"(best {self.best:5.3f}, target {self.target:.2f}) {verdict}"
        )


def interleave(contenders: Mapping[str, Run], effort: Effort) -> dict[str, tuple[float, ...]]:
    """Give the seconds a step of each contender's blocks. Every rank calls it; rank 0's clock counts."""
    steps = {}
    for name, run in contenders.items():
        run(effort.warm_steps)
        steps[name] = _agree(max(1, round(effort.seconds / _timed(run, 2) * 2)))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for block in range(effort.blocks):
        for name in names if block % 2 == 0 else reversed(names):
            found[name].append(_timed(contenders[name], steps[name]) / steps[name])
    return {name: tuple(values) for name, values in found.items()}


def _timed(run: Run, steps: int) -> float:
    barrier()
    start = time.perf_counter()
    run(steps)
    barrier()
    return time.perf_counter() - start


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _agree(number: int) -> int:
    """Take rank 0's number."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    value = torch.tensor([number])
    dist.broadcast(value, 0)
    return int(value)
