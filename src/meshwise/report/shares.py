"""What the page, the pictures and the terminal show alike: names, colours and order of parts, and rows of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .comparison import Comparison, LayoutResult, UnitShare

# Colours that can be told apart with any colour vision (Okabe and Ito 2008), and in grey by their brightness and hatch.
TIME_COLOURS = {
    "compute": "#0072b2",
    "recompute": "#56b4e9",
    "tensor": "#009e73",
    "communication": "#d55e00",
    "bubble": "#b0b0b0",
    "data": "#cc79a7",
    "optimizer": "#e69f00",
    "other": "#7a7a7a",
}
MEMORY_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#d55e00",
    "optimizer": "#e69f00",
    "activations": "#009e73",
    "workspace": "#cc79a7",
    "buffers": "#56b4e9",
    "runtime": "#b0b0b0",
}
BAR_COLOURS = {
    "F": "#0072b2",
    "B": "#56b4e9",
    "I": "#56b4e9",
    "W": "#009e73",
    "recompute": "#004c78",
    "wait": "#b0b0b0",
    "exchange": "#d55e00",
    "clip": "#7a7a7a",
    "update": "#e69f00",
    "load": "#cc79a7",
}
BAR_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "recompute": "forward again",
    "wait": "waiting",
    "exchange": "exchange",
    "clip": "clipping",
    "update": "update",
    "load": "bringing data",
}
HATCHED = frozenset({"bubble", "wait", "communication", "exchange", "runtime"})
MOST_UNITS = 20  # rows of the table of units


@dataclass(frozen=True, kw_only=True)
class UnitRow:
    """Hold one row: a unit, or several in a row that are too many to show; shares are of the whole model (0..1)."""

    name: str
    parameter_share: float
    time_share: float
    boundary_bytes: float


def unit_rows(units: Sequence[UnitShare], most: int = MOST_UNITS) -> list[UnitRow]:
    """Give at most so many rows, in the model's order: neighbours are put together where there are more units."""
    each = -(-len(units) // most) if units else 1
    sizes = sum(u.parameter_bytes for u in units) or 1.0
    seconds = sum(u.seconds for u in units) or 1.0
    rows = []
    for k in range(0, len(units), each):
        part = units[k : k + each]
        name = part[0].name if len(part) == 1 else f"{part[0].name} .. {part[-1].name}"
        rows.append(
            UnitRow(
                name=name,
                parameter_share=sum(u.parameter_bytes for u in part) / sizes,
                time_share=sum(u.seconds for u in part) / seconds,
                boundary_bytes=part[-1].boundary_bytes,
            )
        )
    return rows


def fullest(result: LayoutResult) -> tuple[float | None, float | None]:
    """Give the predicted and the measured bytes of the fullest rank."""
    measured = [bar.measured for bar in result.memory if bar.measured is not None]
    return (
        max((bar.reserved for bar in result.memory), default=None),
        max(measured) if len(measured) == len(result.memory) and measured else None,
    )


def longest_seconds(comparison: Comparison) -> float:
    """Give the longest step, predicted or measured."""
    times = [r.predicted_seconds for r in comparison.results] + [r.median or 0.0 for r in comparison.results]
    return max(times, default=0.0) or 1.0


def parts_in_order(parts: Mapping[str, float], colours: Mapping[str, str]) -> list[tuple[str, float]]:
    """Give the parts that are above zero in the order of their colours."""
    return [(name, parts[name]) for name in colours if parts.get(name, 0.0) > 0]
