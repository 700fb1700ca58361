"""What a comparison of layouts found, as values: what the page, the terminal and the JSON file are made of."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..plans import Rejection

# A part of a step, as the pictures name and colour it: the keys of ``time_parts`` (see plan.TIME_PARTS) and of
# ``memory_parts`` (see plan.MEMORY_PARTS).


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Hold one action on a timeline: ``kind`` is F, B, I, W, recompute, wait, exchange, clip, update or load."""

    rank: int
    kind: str
    label: str  # as "F0.3": stage 0, microbatch 3
    start: float  # seconds from the start of the step
    end: float


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """Hold one rank's memory in bytes: predicted, part by part (plan.MEMORY_PARTS), and the measured peak."""

    rank: int
    parts: Mapping[str, float]
    reserved: float  # predicted, with the allocator's margin
    measured: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """Hold one layout of a comparison; times are seconds.

    ``seconds``: every timed step. ``time_parts`` are medians over steps, of the slowest rank, and add up to a step.
    ``error`` says why it could not be run (then nothing was measured).
    """

    layout: str
    num_devices: int
    samples_per_step: int
    predicted_seconds: float
    seconds: tuple[float, ...] = ()
    time_parts: Mapping[str, float] = field(default_factory=dict)
    predicted_time_parts: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[MemoryBar, ...] = ()
    stages: tuple[str, ...] = ()
    timeline: tuple[Bar, ...] = ()
    predicted_timeline: tuple[Bar, ...] = ()
    error: str = ""

    @property
    def median(self) -> float | None:
        """Give the median time of a step, None where nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Give the throughput, None where nothing was measured."""
        return self.samples_per_step / self.median if self.median else None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitShare:
    """Hold what one unit (a piece of the model that a stage may begin with) has of the whole.

    ``seconds``: forward and backward of one microbatch. ``boundary_bytes``: what is handed on if it is cut behind.
    """

    name: str
    parameter_bytes: float
    seconds: float
    activation_bytes: float
    boundary_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """Hold the step time of the best layout on so many devices (same global batch); seconds, None: not measured."""

    num_devices: int
    layout: str
    predicted_seconds: float
    measured_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold a whole comparison; ``results`` are in the order in which they were asked for.

    ``machine``, ``facts`` (pairs of a name and a text) and ``advice`` (one sentence) are text for people.
    ``limit_bytes`` is what one device may use. ``best`` is the layout that the advice is about. ``units`` are the
    model's, front to back; ``scaling`` is by number of devices.
    """

    job: str
    machine: str
    facts: tuple[tuple[str, str], ...]
    results: tuple[LayoutResult, ...]
    rejected: tuple[Rejection, ...] = ()
    best: str = ""
    advice: str = ""
    limit_bytes: float | None = None
    units: tuple[UnitShare, ...] = ()
    scaling: tuple[ScalingPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give the comparison as plain values."""
        return dataclasses.asdict(self)
