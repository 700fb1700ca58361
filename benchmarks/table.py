"""The one table, as it is printed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .measure import Row

WIDTH = 170
COLUMNS = ("part", "case", "what", "median ms", "value", "middle half", "target", "verdict", "note")
STYLES = {"met": "green", "missed": "red", "no value": "yellow"}


def print_row(row: Row) -> None:
    """Print one row as it comes."""
    part, case, name, milliseconds, value, spread, target, verdict, note = row.shown()
    wanted = f"({target}: {verdict})" if target else ""
    line = f"{part:11} {case:16} {name:70} {milliseconds:>10} {value:>11} {spread:10} {wanted} {note}"
    print(line.rstrip(), flush=True)


def print_table(rows: Sequence[Row]) -> None:
    """Print all rows; a ratio is the seconds of the first over those of the second."""
    table = Table(*COLUMNS, title="meshwise beside its alternatives", caption=_summary(rows))
    for column in (3, 4, 6):
        table.columns[column].justify = "right"
    group = ("", "")
    for row in rows:
        if (row.part, row.case) != group and group[0]:
            table.add_section()
        group = (row.part, row.case)
        table.add_row(*row.shown(), style=STYLES.get(row.verdict))
    Console(width=WIDTH).print(table)


def _summary(rows: Sequence[Row]) -> str:
    verdicts = [row.verdict for row in rows if row.target is not None]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in STYLES)
    return f"targets: {counts}"
