"""The picture of the table: a bar for each contender's ratio, case by case, and where the target lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measure import Row

MINE, OTHER, LINE = "#1f6f8b", "#b9c2c9", "#c0392b"
BAR_INCHES, LONGEST = 0.26, 3.0  # a longer bar is cut, with its number beside it


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


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.unit == "x" and row.value is not None:
            groups.setdefault((row.part, row.case), []).append(row)
    return groups


def _figure(groups: dict[tuple[str, str], list[Row]]) -> Any:
    """Put the groups one below the other in two columns of about equal height."""
    from matplotlib import pyplot

    columns = _columns(groups)
    heights = [sum(len(groups[key]) + 1.6 for key in column) for column in columns]
    figure = pyplot.figure(figsize=(8.5 * len(columns), BAR_INCHES * max(heights)))
    outer = figure.add_gridspec(1, len(columns), wspace=0.75)
    for at, column in enumerate(columns):
        sizes = [len(groups[key]) + 1.6 for key in column]
        rest = max(heights) - sum(sizes)
        inner = outer[at].subgridspec(len(column) + 1, 1, height_ratios=[*sizes, max(rest, 0.01)], hspace=0.0)
        for row, key in enumerate(column):
            _bars(figure.add_subplot(inner[row]), " ".join(key), groups[key])
    return figure


def _columns(groups: dict[tuple[str, str], list[Row]]) -> list[list[tuple[str, str]]]:
    total = sum(len(rows) + 1.6 for rows in groups.values())
    columns: list[list[tuple[str, str]]] = [[]]
    height = 0.0
    for key, rows in groups.items():
        if columns[-1] and len(columns) == 1 and len(groups) > 3 and height + len(rows) / 2 > total / 2:
            columns.append([])
        columns[-1].append(key)
        height += len(rows) + 1.6
    return columns


def _bars(axes: Any, title: str, rows: Sequence[Row]) -> None:
    """Draw one case: what meshwise does in colour, its alternatives in grey, 1 as a dotted line, the target red."""
    for at, row in enumerate(rows):
        assert row.value is not None
        mine = row.target is not None or row.name.startswith("meshwise")
        axes.barh(at, min(row.value, LONGEST), height=0.72, color=MINE if mine else OTHER)
        axes.text(min(row.value, LONGEST) + 0.03, at, f"{row.value:.2f}", va="center", fontsize=8)
        if row.target is not None:
            axes.plot([row.target] * 2, [at - 0.45, at + 0.45], color=LINE, linewidth=2)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [_label(row, rows) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) + 0.1, -0.6)
    axes.set_xlim(0, LONGEST + 0.3)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold", pad=3)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _label(row: Row, rows: Sequence[Row]) -> str:
    """Name the contender, and what it is compared with where that changes from row to row."""
    return row.name if len({r.against for r in rows}) == 1 else f"{row.name} / {row.against}"
