"""The plan: the layout that was chosen, its cuts, what it costs term by term, and why the others lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layout import Layout
from .quantities import format_bytes, format_seconds

TIME_PARTS = ("compute", "recompute", "tensor", "communication", "bubble", "data", "optimizer", "other")
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers", "runtime")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """State the predicted peak of one pipeline rank in bytes, part by part; every replica's is the same.

    ``parts`` maps MEMORY_PARTS to bytes and adds up to ``allocated``; ``reserved`` is what the allocator holds for it.
    ``live_microbatches``: the most whose activations it keeps at once.
    """

    parts: Mapping[str, float]
    reserved: float
    live_microbatches: int = 0

    @property
    def allocated(self) -> float:
        """Give the bytes of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        held = sorted(((v, k) for k, v in self.parts.items() if v >= 0.01 * self.reserved), reverse=True)
        return f"{format_bytes(self.reserved)} ({', '.join(f'{k} {format_bytes(v)}' for v, k in held)})"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """State what a step costs under one layout.

    ``time_parts`` maps TIME_PARTS to seconds of the slowest rank and adds up to ``seconds``; ``memory`` is for each
    pipeline rank. ``spread``: how far the true time may be off, as a share (0.1: ten percent).
    ``notes`` say what was not counted.
    """

    seconds: float
    time_parts: Mapping[str, float]
    memory: tuple[RankMemory, ...]
    spread: float = 0.1
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> float:
        """Give the memory of the fullest rank."""
        return max(rank.reserved for rank in self.memory)

    def __str__(self) -> str:
        parts = sorted(((v, k) for k, v in self.time_parts.items() if v >= 0.01 * self.seconds), reverse=True)
        shares = ", ".join(f"{k} {format_seconds(v)}" for v, k in parts)
        return f"{format_seconds(self.seconds)} a step ({shares}); {format_bytes(self.peak_bytes)} on the fullest rank"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Hold one layout that fits: its cuts (first unit of each stage after the first), estimate and measured time."""

    layout: Layout
    microbatch_size: int
    cuts: tuple[int, ...]
    estimate: Estimate
    stages: tuple[str, ...] = ()  # what each stage holds, in words
    measured_seconds: float | None = None
    measured_bytes: float | None = None

    @property
    def seconds(self) -> float:
        """Give the measured time where there is one, else the predicted."""
        return self.estimate.seconds if self.measured_seconds is None else self.measured_seconds


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Hold one layout that cannot be taken, and why, with the numbers.

    ``held_bytes``: what its fullest rank would hold, where that is the reason.
    """

    layout: str
    reason: str
    held_bytes: float | None = None

    def __str__(self) -> str:
        return f"{self.layout}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what the planner found for one job on one cluster.

    ``chosen`` is the fastest candidate that fits (measured, where measured); ``others`` are the rest, fastest first.
    ``advice`` are the sentences of :meth:`explain`.
    """

    job: str
    cluster: str
    num_devices: int
    batch_size: int
    chosen: Candidate
    others: tuple[Candidate, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    limit_bytes: float | None = None
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def layout(self) -> Layout:
        """Give the chosen layout."""
        return self.chosen.layout

    def explain(self) -> str:
        """Give the advice as text: what to take, what limits it, what would change it, how sure that is."""
        return "\n".join(self.advice)

    def __str__(self) -> str:
        return f"{self.layout} for {self.job} on {self.cluster}: {self.chosen.estimate}"

    def to_json(self) -> dict[str, Any]:
        """Give the plan as plain values."""
        facts = dataclasses.asdict(self)
        for candidate, made in ((facts["chosen"], self.chosen), *zip(facts["others"], self.others, strict=True)):
            candidate["layout"] = str(made.layout)
        return facts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_json` gave."""
        plain = json.loads(json.dumps(facts))
        flat: dict[str, Any] = {k: _frozen(v) for k, v in plain.items() if k not in _NESTED}
        return cls(
            **flat,
            chosen=_candidate(plain["chosen"]),
            others=tuple(map(_candidate, plain["others"])),
            rejected=tuple(Rejection(**r) for r in plain["rejected"]),
        )


_NESTED = ("chosen", "others", "rejected")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _candidate(facts: dict[str, Any]) -> Candidate:
    rest: dict[str, Any] = {k: _frozen(v) for k, v in facts.items() if k not in ("layout", "estimate")}
    terms: dict[str, Any] = {k: _frozen(v) for k, v in facts["estimate"].items() if k != "memory"}
    memory = tuple(RankMemory(**rank) for rank in facts["estimate"]["memory"])
    return Candidate(layout=Layout.parse(facts["layout"]), estimate=Estimate(memory=memory, **terms), **rest)
