"""Show a plan or a comparison on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..plans import Candidate, Plan, Rejection
from ..quantities import format_bytes, format_seconds
from .comparison import Comparison, LayoutResult
from .shares import fullest, unit_rows

SHOWN_CANDIDATES, SHOWN_REJECTIONS, SHOWN_UNITS = 8, 6, 12


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan: its advice, the layouts that fit, its stages, and why others do not."""
    out = console or Console()
    out.print(f"[bold]{escape(plan.job)}[/bold] on {escape(plan.cluster)}, {plan.num_devices} devices", soft_wrap=True)
    for line in plan.advice:
        out.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    _candidates(out, [plan.chosen, *plan.others])
    _stages(out, plan.chosen)
    _rejections(out, plan.rejected)
    for note in (*plan.notes, *plan.chosen.estimate.notes):
        out.print(f"  note: {escape(note)}", style="dim", highlight=False, soft_wrap=True)


def _candidates(out: Console, candidates: Sequence[Candidate]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layout", overflow="fold")
    for name in ("predicted", "measured", "fullest rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most of it", overflow="fold")
    for c in candidates[:SHOWN_CANDIDATES]:
        parts = sorted(((v, k) for k, v in c.estimate.time_parts.items()), reverse=True)[:2]
        shares = ", ".join(f"{k} {v / c.estimate.seconds:.0%}" for v, k in parts if v)
        size = f", microbatch {c.microbatch_size}" if len({o.microbatch_size for o in candidates}) > 1 else ""
        table.add_row(
            escape(f"{c.layout}{size}"),
            format_seconds(c.estimate.seconds),
            "" if c.measured_seconds is None else format_seconds(c.measured_seconds),
            format_bytes(c.estimate.peak_bytes),
            shares,
        )
    out.print(table)
    if len(candidates) > SHOWN_CANDIDATES:
        out.print(f"  and {len(candidates) - SHOWN_CANDIDATES} more that fit", style="dim")


def _stages(out: Console, chosen: Candidate) -> None:
    if len(chosen.stages) < 2:
        return
    out.print(f"stages of {chosen.layout}:", highlight=False)
    for number, name in enumerate(chosen.stages[:16]):
        memory = chosen.estimate.memory[number % len(chosen.estimate.memory)]
        out.print(f"  {number}  {escape(name)}; rank: {memory}", highlight=False, soft_wrap=True)
    if len(chosen.stages) > 16:
        out.print(f"  and {len(chosen.stages) - 16} more", style="dim")


def _rejections(out: Console, rejected: Sequence[Rejection]) -> None:
    if not rejected:
        return
    out.print("not taken:", highlight=False)
    for rejection in rejected[:SHOWN_REJECTIONS]:
        out.print(f"  {escape(str(rejection))}", highlight=False, soft_wrap=True)
    if len(rejected) > SHOWN_REJECTIONS:
        out.print(f"  and {len(rejected) - SHOWN_REJECTIONS} more", style="dim")


def show_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison: the advice, a table of layouts, the model's units, and why others were not run."""
    out = console or Console()
    out.print(f"[bold]{escape(comparison.job)}[/bold] on {escape(comparison.machine)}", soft_wrap=True)
    out.print(f"  {escape(comparison.advice)}", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layout", overflow="fold", min_width=24)
    for name in ("step", "off", "samples/s", "memory", "off", "bubble", "comm."):
        table.add_column(name, justify="right", no_wrap=True)
    for result in comparison.results:
        table.add_row(*_row(result, result.layout == comparison.best))
    out.print(table)
    out.print("  off: how far the prediction is above what was measured; memory: of the fullest rank", style="dim")
    for result in comparison.results:
        if result.error:
            out.print(
                f"  {escape(result.layout)}: {escape(result.error)}", style="red", highlight=False, soft_wrap=True
            )
    _units(out, comparison)
    _rejections(out, comparison.rejected)
    for note in comparison.notes:
        out.print(f"  note: {escape(note)}", style="dim", highlight=False, soft_wrap=True)


def _row(result: LayoutResult, is_best: bool) -> list[str]:
    predicted, measured = fullest(result)
    parts = result.time_parts
    total = sum(parts.values())
    rate = result.samples_per_second
    return [
        f"[bold]{escape(result.layout)}[/bold]" if is_best else escape(result.layout),
        "-" if result.median is None else format_seconds(result.median),
        "-" if result.median is None else f"{result.predicted_seconds / result.median - 1:+.0%}",
        "-" if rate is None else f"{rate:,.0f}",
        "-" if measured is None else format_bytes(measured),
        "-" if predicted is None or not measured else f"{predicted / measured - 1:+.0%}",
        f"{parts.get('bubble', 0.0) / total:.0%}" if total else "-",
        f"{parts.get('communication', 0.0) / total:.0%}" if total else "-",
    ]


def _units(out: Console, comparison: Comparison) -> None:
    rows = unit_rows(comparison.units, SHOWN_UNITS)
    if len(rows) < 2:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("the model, front to back", overflow="fold")
    for name in ("parameters", "time", "handed on"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row.name), f"{row.parameter_share:.0%}", f"{row.time_share:.0%}", format_bytes(row.boundary_bytes)
        )
    out.print(table)
