"""Values of one optimizer step: the batch as microbatches, how replicas share them, and the result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CaptureError
from ..grid import Range, slot_ranges, split_evenly


@dataclass(kw_only=True)
class StepBatch:
    """Hold one global batch as microbatches that are loaded when asked for.

    ``sizes``: samples of each microbatch; ``ids``: sample ids in order (empty when the user brings tensors).
    """

    sizes: tuple[int, ...]
    load: Callable[[int], Any]
    ids: tuple[int, ...] = ()
    epoch: int = 0
    loaded: dict[int, Any] = field(default_factory=dict)

    def microbatch(self, m: int) -> Any:
        """Load microbatch ``m`` (kept until the step ends)."""
        if m not in self.loaded:
            self.loaded[m] = self.load(m)
        return self.loaded[m]

    @property
    def num_samples(self) -> int:
        """Count the samples of the step."""
        return sum(self.sizes)

    def ids_of(self, m: int) -> tuple[int, ...]:
        """List the sample ids of microbatch ``m``."""
        start = sum(self.sizes[:m])
        return self.ids[start : start + self.sizes[m]]


@dataclass(frozen=True, kw_only=True)
class Share:
    """State how the microbatches of a step are shared: slots of the tree, and which replica holds which."""

    num_microbatches: int
    slots: tuple[Range, ...]  # microbatch range of each slot
    replicas: tuple[Range, ...]  # slot range of each replica
    microbatches: tuple[Range, ...]  # microbatch range of each replica

    @classmethod
    def make(cls, num_microbatches: int, slots: int, dp: int) -> Share:
        """Share ``num_microbatches`` over ``dp`` replicas in whole slots."""
        groups = slot_ranges(num_microbatches, slots)
        replicas = split_evenly(len(groups), dp)
        ranges = tuple((groups[a][0], groups[b - 1][1]) if a < b else (0, 0) for a, b in replicas)
        return cls(num_microbatches=num_microbatches, slots=groups, replicas=replicas, microbatches=ranges)

    @functools.cached_property
    def counts(self) -> list[int]:
        """Count each replica's microbatches."""
        return [b - a for a, b in self.microbatches]

    @property
    def has_idle(self) -> bool:
        """Tell whether some replica has no microbatch in this step."""
        return 0 in self.counts

    def slot_end(self, m: int) -> int | None:
        """Give the slot that ends with microbatch ``m``, or None."""
        return self._ends.get(m)

    def slot_begin(self, m: int) -> int | None:
        """Give the slot that begins with microbatch ``m``, or None."""
        return self._begins.get(m)

    @functools.cached_property
    def _begins(self) -> dict[int, int]:
        return {start: slot for slot, (start, _) in enumerate(self.slots)}

    @functools.cached_property
    def _ends(self) -> dict[int, int]:
        return {stop - 1: slot for slot, (_, stop) in enumerate(self.slots)}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Hold what a step gave: the same numbers on every rank, under every layout."""

    step: int
    loss: float
    grad_norm: float | None
    num_samples: int
    losses: tuple[float, ...]
    skipped: bool = False
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:.6g}"
        return f"step {self.step}: loss {self.loss:.6g}{norm}, {self.num_samples} samples"


def mixed_step(step: int) -> CaptureError:
    """Make the error for microbatches of one step that do not all use the same parameters."""
    return CaptureError(
        f"step {step}: some of its microbatches use other parameters than others (a branch on a value in the "
        "batch?). Let all samples of a step take the same path, or choose it with tensors inside the model."
    )
