"""The picture of the table: a bar for each contender's ratio, case by case, and where the target lies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measure import Row

MINE, OTHER, LINE = "#1f6f8b", "#b9c2c9", "#c0392b"
LONGEST = 3.0  # a longer bar is cut, with its number beside it
TITLE, GAP = 1.1, 0.7  # rows that a title and the space after a case take
ROW_INCHES, COLUMN_INCHES, HEAD_INCHES = 0.25, 9.5, 0.7
EXPLAINED = "Seconds a step, as a ratio to what the title names (dotted line); shorter is faster. Red: the target."

Key = tuple[str, str]


def draw(rows: Sequence[Row], path: Path) -> str:
    """Draw the rows that are ratios with something to show; say where the picture is, or why there is none."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return 'no picture: matplotlib is not installed (pip install -e ".[bench]")'
    matplotlib.use("Agg")
    groups = _groups(rows)
    if not groups:
        return "no picture: no ratios were measured"
    _figure(groups).savefig(path, bbox_inches="tight", dpi=110)
    return f"picture: {path}"


def _groups(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        if row.unit == "x" and row.value is not None:
            groups.setdefault((row.part, row.case), []).append(row)
    return groups


def _height(rows: Sequence[Row]) -> float:
    return len(rows) + TITLE + GAP


def _figure(groups: dict[Key, list[Row]]) -> Any:
    """Put the groups one below the other, many of them in two columns of about equal height."""
    from matplotlib import pyplot

    columns = _columns(groups)
    tallest = max(sum(_height(groups[key]) for key in column) for column in columns)
    size = (COLUMN_INCHES * len(columns), ROW_INCHES * tallest + HEAD_INCHES)
    figure, axes = pyplot.subplots(1, len(columns), figsize=size, squeeze=False)
    figure.subplots_adjust(wspace=0.85, top=1 - HEAD_INCHES / size[1], bottom=0.0)
    figure.suptitle(EXPLAINED, fontsize=9, y=1 - HEAD_INCHES / size[1] / 3)
    for axis, column in zip(axes[0], columns, strict=True):
        _column(axis, {key: groups[key] for key in column}, tallest)
    return figure


def _columns(groups: dict[Key, list[Row]]) -> list[list[Key]]:
    """Share the groups between columns: the second begins in the middle."""
    keys = list(groups)
    if len(keys) < 4:
        return [keys]
    ends = list(itertools.accumulate(_height(groups[key]) for key in keys))
    first = min(range(1, len(keys)), key=lambda count: abs(ends[count - 1] - ends[-1] / 2))
    return [keys[:first], keys[first:]]


def _column(axis: Any, groups: dict[Key, list[Row]], tallest: float) -> None:
    ticks: dict[float, str] = {}
    at = 0.0
    for (part, case), rows in groups.items():
        others = list(dict.fromkeys(row.against for row in rows))
        title = f"{part}: {case}, over {others[0]}" if len(others) == 1 else f"{part}: {case}"
        axis.text(0, at + 0.35, title, fontsize=9, fontweight="bold", va="center")
        for number, row in enumerate(rows):
            place = at + TITLE + number
            ticks[place] = row.name if len(others) == 1 else f"{row.name} / {row.against}"
            _bar(axis, place, row)
        axis.plot([1.0] * 2, [at + TITLE - 0.5, at + TITLE + len(rows) - 0.5], "k:", linewidth=0.8, zorder=0)
        at += _height(rows)
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.set_ylim(tallest, -0.2)
    axis.set_xlim(0, LONGEST + 0.3)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _bar(axis: Any, place: float, row: Row) -> None:
    """Draw what meshwise does in colour and others in grey, with the number, and the target as a red line."""
    assert row.value is not None
    mine = row.target is not None or row.name.startswith("meshwise")
    shown = min(row.value, LONGEST)
    axis.barh(place, shown, height=0.72, color=MINE if mine else OTHER, zorder=1)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    number = f"{row.value:.2f}" + " (cut)" * (row.value > LONGEST)
    axis.text(shown + 0.04, place, number, va="center", fontsize=8, bbox=box, zorder=4)
    if row.target is not None:
        axis.plot([row.target] * 2, [place - 0.42, place + 0.42], color=LINE, linewidth=2, zorder=3)
