"""The page of a comparison: one HTML file without scripts, fonts or links to elsewhere; light, dark and on paper.

Bars are boxes with widths in percent, so that they fit a phone and their text stays legible. Every text that comes from
the user's code is escaped in one place, :func:`_text`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..quantities import format_bytes, format_seconds
from .comparison import Bar, Comparison, LayoutResult
from .shares import (
    BAR_COLOURS,
    BAR_NAMES,
    HATCHED,
    MEMORY_COLOURS,
    TIME_COLOURS,
    fullest,
    longest_seconds,
    parts_in_order,
    unit_rows,
)
from .style import STYLE

FILE_NAME = "comparison.html"
PICTURES = ("step-time", "memory", "timelines", "predictions", "scaling", "units")


def write_page(comparison: Comparison, folder: Path) -> Path:
    """Write the page into a folder and give its path; pictures that lie there already are linked."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    path.write_text(make_page(comparison, _files(folder)), encoding="utf-8")
    return path


def _files(folder: Path) -> dict[str, list[str]]:
    kinds = {name: [f"{name}.{kind}" for kind in ("svg", "png")] for name in PICTURES}
    return {name: [file for file in files if (folder / file).is_file()] for name, files in kinds.items()}


def make_page(comparison: Comparison, files: Mapping[str, Sequence[str]] | None = None) -> str:
    """Give the page as text. ``files`` names the picture files of each section that lie beside it."""
    links = files or {}
    sections = [
        _head(comparison),
        _table(comparison),
        _section("Where a step's time goes", _times(comparison), links.get("step-time", ()), TIME_NOTE),
        _section("Memory of each rank", _memory(comparison), links.get("memory", ()), MEMORY_NOTE),
        _section("One step on the clock", _timelines(comparison), links.get("timelines", ()), TIMELINE_NOTE),
        _section("Predicted beside measured", _predictions(comparison), links.get("predictions", ())),
        _section("More devices", _scaling(comparison), links.get("scaling", ()), SCALING_NOTE),
        _section("The model, front to back", _units(comparison), links.get("units", ()), UNITS_NOTE),
        _section("Not run", _rejected(comparison)),
        _facts(comparison),
    ]
    title = f"{_text(comparison.job)}: layouts compared"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


TIME_NOTE = "Above what was predicted, below what was measured on the rank that computes most. Same scale for all."
MEMORY_NOTE = "Coloured: predicted, part by part. The mark is the measured peak of the process above its baseline."
TIMELINE_NOTE = "The real step, and below it the predicted one (plan), on one scale. A row is a rank."
SCALING_NOTE = "The best layout on so many devices, the same batch; the mark is where perfect scaling would be."
UNITS_NOTE = (
    "What a stage may begin with. dp exchanges all parameters each step; pp hands on what the last column says."
)


def _text(value: object) -> str:
    """Escape what may come from the user's code."""
    return html.escape(str(value), quote=True)


def _section(title: str, body: str, files: Sequence[str] = (), note: str = "") -> str:
    if not body:
        return ""
    saved = " ".join(f'<a href="{_text(f)}" download>{_text(f.rpartition(".")[2].upper())}</a>' for f in files)
    shown = f'<span class="files">{saved}</span>' if saved else ""
    caption = f'<p class="note">{note}</p>' if note else ""
    return f"<section>\n<h2>{title}{shown}</h2>\n{caption}{body}</section>\n"


def _head(comparison: Comparison) -> str:
    return (
        f'<header>\n<p class="kind">Layouts compared</p>\n<h1>{_text(comparison.job)}</h1>\n'
        f'<p class="machine">{_text(comparison.machine)}</p>\n'
        f'<p class="advice">{_text(comparison.advice)}</p>\n</header>\n'
    )


# ---- the table ---------------------------------------------------------------------------------------------


def _table(comparison: Comparison) -> str:
    head = "".join(f"<th>{name}</th>" for name in TABLE_HEAD)
    rows = "".join(_table_row(r, r.layout == comparison.best) for r in comparison.results)
    return (
        f'<section>\n<h2>Layouts</h2>\n<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n</section>\n"
    )


TABLE_HEAD = ("layout", "step", "predicted", "samples/s", "fullest rank", "predicted", "devices")


def _table_row(result: LayoutResult, is_best: bool) -> str:
    predicted, measured = fullest(result)
    rate = result.samples_per_second
    cells = [
        "not run" if result.median is None else format_seconds(result.median),
        format_seconds(result.predicted_seconds),
        "" if rate is None else f"{rate:,.0f}",
        "" if measured is None else format_bytes(measured),
        "" if predicted is None else format_bytes(predicted),
        str(result.num_devices),
    ]
    mark = ' <span class="best">best</span>' if is_best else ""
    error = f'<p class="error">{_text(result.error)}</p>' if result.error else ""
    figures = "".join(f"<td>{_text(c)}</td>" for c in cells)
    head = f'<th scope="row">{_text(result.layout)}{mark}{error}</th>'
    return f"<tr{' class=chosen' if is_best else ''}>{head}{figures}</tr>\n"


# ---- bars --------------------------------------------------------------------------------------------------


def _piece(share: float, colour: str, title: str, name: str, label: str = "") -> str:
    hatch = " hatch" if name in HATCHED else ""
    return (
        f'<span class="piece{hatch}" style="width:{100 * share:.3f}%;background-color:{colour}" title="{_text(title)}">'
        f"{_text(label)}</span>"
    )


def _stack(
    parts: Mapping[str, float], whole: float, colours: Mapping[str, str], figure: str, what: str, more: str = ""
) -> str:
    """Draw one row of pieces; what they mean and how much each is can be read by pointing at it."""
    show = format_bytes if colours is MEMORY_COLOURS else format_seconds
    pieces = "".join(_piece(v / whole, colours[k], f"{k} {show(v)}", k) for k, v in parts_in_order(parts, colours))
    return (
        f'<div class="row"><span class="what">{_text(what)}</span><span class="track">{pieces}{more}</span>'
        f'<span class="figure">{_text(figure)}</span></div>\n'
    )


def _legend(names: Iterable[str], colours: Mapping[str, str], shown: Mapping[str, str] | None = None) -> str:
    items = "".join(
        f'<li><span class="key{" hatch" if n in HATCHED else ""}" style="background-color:{colours[n]}"></span>'
        f"{_text((shown or {}).get(n, n))}</li>"
        for n in colours
        if n in set(names)
    )
    return f'<ul class="legend">{items}</ul>\n'


def _times(comparison: Comparison) -> str:
    whole = longest_seconds(comparison)
    body, used = "", set()
    for r in comparison.results:
        rows = _stack(r.predicted_time_parts, whole, TIME_COLOURS, format_seconds(r.predicted_seconds), "predicted")
        if r.median is not None and r.time_parts:
            rows += _stack(r.time_parts, whole, TIME_COLOURS, format_seconds(r.median), "measured")
        used |= {k for parts in (r.time_parts, r.predicted_time_parts) for k, v in parts.items() if v > 0}
        body += f'<div class="group"><h3>{_text(r.layout)}</h3>\n{rows}</div>\n'
    return _legend(used, TIME_COLOURS) + body if body else ""


def _memory(comparison: Comparison) -> str:
    bars = [bar for r in comparison.results for bar in r.memory]
    if not bars:
        return ""
    whole = 1.05 * max(max(bar.reserved, bar.measured or 0.0) for bar in bars)
    limit = comparison.limit_bytes
    body, used = "", {k for bar in bars for k, v in bar.parts.items() if v > 0}
    for r in comparison.results:
        rows = ""
        for bar in r.memory:
            marks = (
                "" if bar.measured is None else _mark(bar.measured / whole, f"measured {format_bytes(bar.measured)}")
            )
            if limit is not None and limit <= whole:
                marks += _mark(limit / whole, f"limit {format_bytes(limit)}", "limit")
            parts = dict(bar.parts)
            parts["runtime"] = parts.get("runtime", 0.0) + max(0.0, bar.reserved - sum(bar.parts.values()))
            measured = "" if bar.measured is None else f" / {format_bytes(bar.measured)}"
            figure = format_bytes(bar.reserved) + measured
            rows += _stack(parts, whole, MEMORY_COLOURS, figure, f"rank {bar.rank}", marks)
        body += f'<div class="group"><h3>{_text(r.layout)}</h3>\n{rows}</div>\n'
    return _legend(used, MEMORY_COLOURS) + body


def _mark(share: float, title: str, kind: str = "") -> str:
    return f'<span class="mark {kind}" style="left:{100 * share:.3f}%" title="{_text(title)}"></span>'


# ---- timelines ---------------------------------------------------------------------------------------------


def _timelines(comparison: Comparison) -> str:
    body, used = "", set()
    for r in comparison.results:
        rows = [("real", r.timeline), ("plan", r.predicted_timeline)]
        whole = max((bar.end for _, bars in rows for bar in bars), default=0.0)
        if not whole:
            continue
        used |= {bar.kind for _, bars in rows for bar in bars}
        lanes = "".join(_lanes(name, bars, whole) for name, bars in rows if bars)
        body += f'<div class="group"><h3>{_text(r.layout)}</h3>\n{lanes}</div>\n'
    return _legend(used, BAR_COLOURS, BAR_NAMES) + body if body else ""


def _lanes(name: str, bars: Sequence[Bar], whole: float) -> str:
    ranks = sorted({bar.rank for bar in bars})
    end = max(bar.end for bar in bars)
    lanes = "".join(
        f'<div class="row"><span class="what">{name if rank == ranks[0] else ""} {rank}</span>'
        f'<span class="track lane">{"".join(_bar(b, whole) for b in bars if b.rank == rank)}</span>'
        f'<span class="figure">{_text(format_seconds(end)) if rank == ranks[0] else ""}</span></div>\n'
        for rank in ranks
    )
    return lanes


def _bar(bar: Bar, whole: float) -> str:
    start, width = 100 * bar.start / whole, 100 * (bar.end - bar.start) / whole
    hatch = " hatch" if bar.kind in HATCHED else ""
    title = f"{bar.label}: {format_seconds(bar.end - bar.start)} from {format_seconds(bar.start)}"
    return (
        f'<i class="bar{hatch}" style="left:{start:.3f}%;width:{width:.3f}%;'
        f'background-color:{BAR_COLOURS.get(bar.kind, "#7a7a7a")}" title="{_text(title)}"></i>'
    )


# ---- the rest ----------------------------------------------------------------------------------------------


def _predictions(comparison: Comparison) -> str:
    rows = ""
    for r in comparison.results:
        if r.median is None:
            continue
        predicted, measured = fullest(r)
        memory = "" if predicted is None or not measured else f"{predicted / measured - 1:+.0%}"
        rows += (
            f'<tr><th scope="row">{_text(r.layout)}</th><td>{format_seconds(r.predicted_seconds)}</td>'
            f"<td>{format_seconds(r.median)}</td><td>{r.predicted_seconds / r.median - 1:+.0%}</td>"
            f"<td>{'' if predicted is None else format_bytes(predicted)}</td>"
            f"<td>{'' if measured is None else format_bytes(measured)}</td><td>{memory}</td></tr>\n"
        )
    head = "".join(f"<th>{n}</th>" for n in ("layout", "time", "measured", "off", "memory", "measured", "off"))
    table = (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'
    )
    return table if rows else ""


def _scaling(comparison: Comparison) -> str:
    points = comparison.scaling
    if len(points) < 2:
        return ""
    times = [p.measured_seconds or p.predicted_seconds for p in points]
    whole = max(times)
    first = times[0] * points[0].num_devices
    rows = ""
    for point, seconds in zip(points, times, strict=True):
        ideal = first / point.num_devices
        kind = "measured" if point.measured_seconds is not None else "predicted"
        piece = _piece(seconds / whole, TIME_COLOURS["compute"], f"{kind} {format_seconds(seconds)}", kind)
        mark = _mark(ideal / whole, f"perfect scaling {format_seconds(ideal)}")
        rows += (
            f'<div class="row"><span class="what">{_devices(point.num_devices)}</span>'
            f'<span class="track">{piece}{mark}</span>'
            f'<span class="figure">{_text(format_seconds(seconds))}</span></div>\n'
            f'<p class="under">{_text(point.layout)}, {kind}, {times[0] / seconds:.2f} times as fast as on '
            f"{points[0].num_devices}</p>\n"
        )
    return rows


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _units(comparison: Comparison) -> str:
    rows = unit_rows(comparison.units)
    if len(rows) < 2:
        return ""
    body = "".join(
        f'<tr><th scope="row">{_text(r.name)}</th>{_share_cell(r.parameter_share, "#0072b2")}'
        f"{_share_cell(r.time_share, '#e69f00')}<td>{_text(format_bytes(r.boundary_bytes))}</td></tr>\n"
        for r in rows
    )
    head = "".join(f"<th>{n}</th>" for n in ("unit", "parameters", "time", "handed on"))
    return (
        f'<div class="scroll" tabindex="0"><table class="units"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _share_cell(share: float, colour: str) -> str:
    style = f"width:{max(0.5, 100 * share):.2f}%;background-color:{colour}"
    return f'<td class="share"><span class="mini" style="{style}"></span><span>{share:.0%}</span></td>'


def _rejected(comparison: Comparison) -> str:
    items = "".join(f"<li><b>{_text(r.layout)}</b>: {_text(r.reason)}</li>\n" for r in comparison.rejected)
    return f'<ul class="plain">\n{items}</ul>\n' if items else ""


def _facts(comparison: Comparison) -> str:
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in comparison.facts)
    notes = "".join(f"<p class=note>{_text(note)}</p>\n" for note in comparison.notes)
    return f"<section>\n<h2>What was compared</h2>\n<dl>\n{rows}</dl>\n{notes}</section>\n" if rows or notes else ""
