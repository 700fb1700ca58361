"""The values of a measurement: how much effort, what a contender's blocks gave, and a row of the table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Effort:
    """State how long to measure: blocks for each contender, and the least seconds of a block."""

    blocks: int = 7
    seconds: float = 0.5
    warm_steps: int = 3

    @classmethod
    def quick(cls) -> Effort:
        """Give the least effort that gives numbers at all."""
        return cls(blocks=3, seconds=0.05, warm_steps=2)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Hold the seconds a step of each of a contender's blocks, or why there are none; and what else it told."""

    seconds: tuple[float, ...] = ()
    note: str = ""
    told: Any = None

    @property
    def median(self) -> float | None:
        """Give the median of the blocks."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one row: a contender's value in ``unit`` ("x" is a ratio to ``against``), and what it should be.

    A smaller value is better, unless the target is one to reach (``at_least``). Without a value, ``note`` says why.
    """

    part: str
    case: str
    name: str
    against: str = ""
    value: float | None
    unit: str = "x"
    target: float | None = None
    at_least: bool = False
    seconds: tuple[float, ...] = ()
    against_seconds: tuple[float, ...] = ()
    note: str = ""

    @classmethod
    def ratio(
        cls, part: str, case: str, found: dict[str, Result], name: str, against: str, target: float | None = None
    ) -> Row:
        """Compare the medians of two contenders; there is no target where the other one cannot run."""
        mine, other = found[name], found[against]
        value = mine.median / other.median if mine.median and other.median else None
        return cls(
            part=part,
            case=case,
            name=name,
            against=against,
            value=value,
            target=None if other.note and not mine.note else target,
            seconds=mine.seconds,
            against_seconds=other.seconds,
            note=mine.note or (f"{against}: {other.note}" if other.note else ""),
        )

    @property
    def key(self) -> str:
        """Name what was measured."""
        return f"{self.part}/{self.case}/{self.name}" + (f" vs {self.against}" if self.against else "")

    @property
    def verdict(self) -> str:
        """Say whether the target is met; nothing where there is none."""
        if self.target is None:
            return ""
        if self.value is None:
            return "no value"
        met = self.value >= self.target if self.at_least else self.value <= self.target
        return "met" if met else "missed"

    @property
    def spread(self) -> tuple[float, float] | None:
        """Give the middle half of the ratios of blocks that ran beside each other."""
        if self.unit != "x" or len(self.seconds) < 3 or len(self.seconds) != len(self.against_seconds):
            return None
        ratios = [a / b for a, b in zip(self.seconds, self.against_seconds, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        return low, high

    def as_dict(self) -> dict[str, object]:
        """Give the row as plain values, with the seconds a step of every block."""
        return {
            "key": self.key,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()},
            "median_seconds": statistics.median(self.seconds) if self.seconds else None,
            "spread": self.spread,
            "verdict": self.verdict,
        }

    def shown(self) -> list[str]:
        """Give the row as the texts of the table's columns."""
        milliseconds = f"{statistics.median(self.seconds) * 1e3:.3f}" if self.seconds else ""
        value = "-" if self.value is None else f"{self.value:.3g}" if self.unit != "x" else f"{self.value:.3f}"
        unit = "" if self.unit == "x" or self.value is None else f" {self.unit}"
        spread = f"{self.spread[0]:.2f}-{self.spread[1]:.2f}" if self.spread else ""
        sign = ">=" if self.at_least else "<="
        target = "" if self.target is None else f"{sign} {self.target:g}"
        name = f"{self.name} / {self.against}" if self.against else self.name
        return [self.part, self.case, name, milliseconds, value + unit, spread, target, self.verdict, self.note]
