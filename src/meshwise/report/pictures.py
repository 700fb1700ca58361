"""The pictures of a comparison as SVG and PNG files, drawn with matplotlib (an extra: meshwise[report])."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import JobError
from .comparison import Bar, Comparison
from .shares import (
    BAR_COLOURS,
    BAR_NAMES,
    HATCHED,
    MEMORY_COLOURS,
    TIME_COLOURS,
    fullest,
    parts_in_order,
    unit_rows,
)

MIB = float(1 << 20)
DOTS_PER_INCH = 150


def write_pictures(comparison: Comparison, folder: Path) -> list[Path]:
    """Write each picture that there is something to draw for, as SVG and as PNG. Raises JobError without matplotlib."""
    figure_class = _matplotlib()
    draw: dict[str, Callable[[Comparison, Any], Any]] = {
        "step-time": _step_time,
        "memory": _memory,
        "timelines": _timelines,
        "predictions": _predictions,
        "scaling": _scaling,
        "units": _units,
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, function in draw.items():
        figure = function(comparison, figure_class)
        for kind in ("svg", "png") if figure is not None else ():
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight", facecolor="white")
            written.append(path)
    return written


def _matplotlib() -> Any:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise JobError('pictures need matplotlib: pip install "meshwise[report]".') from None
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.6})
    return Figure


def _plain(text: str) -> str:
    """Keep matplotlib from reading a user's text as mathematics."""
    return text.replace("$", r"\$")


def _axes(figure_class: Any, height: float, width: float = 8.0) -> tuple[Any, Any]:
    figure = figure_class(figsize=(width, max(1.6, height)))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _stack(
    axes: Any, at: float, parts: Mapping[str, float], colours: Mapping[str, str], scale: float, h: float
) -> None:
    left = 0.0
    for name, value in parts_in_order(parts, colours):
        hatch = "////" if name in HATCHED else None
        axes.barh(at, value * scale, h, left=left, color=colours[name], hatch=hatch, edgecolor="white", linewidth=0.5)
        left += value * scale


def _legend(
    axes: Any, names: Sequence[str], colours: Mapping[str, str], shown: Mapping[str, str] | None = None
) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=colours[n],
            hatch="////" if n in HATCHED else None,
            edgecolor="white",
            label=(shown or {}).get(n, n),
        )
        for n in colours
        if n in names
    ]
    axes.legend(handles=handles, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8)


def _step_time(comparison: Comparison, figure_class: Any) -> Any:
    results = comparison.results
    if not results:
        return None
    figure, axes = _axes(figure_class, 0.62 * len(results) + 0.9)
    used: set[str] = set()
    for k, r in enumerate(results):
        _stack(axes, k - 0.19, r.predicted_time_parts, TIME_COLOURS, 1e3, 0.34)
        axes.text(1e3 * r.predicted_seconds, k - 0.19, " predicted", va="center", fontsize=7)
        if r.median is not None and r.time_parts:
            _stack(axes, k + 0.19, r.time_parts, TIME_COLOURS, 1e3, 0.34)
            axes.text(1e3 * r.median, k + 0.19, " measured", va="center", fontsize=7)
        used |= {n for p in (r.time_parts, r.predicted_time_parts) for n, v in p.items() if v > 0}
    axes.set_yticks(range(len(results)), [_plain(r.layout) for r in results])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    _legend(axes, list(used), TIME_COLOURS)
    return figure


def _memory(comparison: Comparison, figure_class: Any) -> Any:
    rows = [(r.layout, bar) for r in comparison.results for bar in r.memory]
    if not rows:
        return None
    figure, axes = _axes(figure_class, 0.3 * len(rows) + 0.9)
    used: set[str] = set()
    for k, (_, bar) in enumerate(rows):
        parts = dict(bar.parts)
        parts["runtime"] = parts.get("runtime", 0.0) + max(0.0, bar.reserved - sum(bar.parts.values()))
        _stack(axes, k, parts, MEMORY_COLOURS, 1 / MIB, 0.7)
        used |= {n for n, v in parts.items() if v > 0}
        if bar.measured is not None:
            axes.plot([bar.measured / MIB] * 2, [k - 0.42, k + 0.42], color="black", linewidth=2)
    most = max(max(bar.reserved, bar.measured or 0.0) for _, bar in rows)
    if comparison.limit_bytes is not None and comparison.limit_bytes <= 1.5 * most:
        axes.axvline(comparison.limit_bytes / MIB, color="#b3261e", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [_plain(f"{layout}, rank {bar.rank}") for layout, bar in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MiB; black: measured peak")
    _legend(axes, list(used), MEMORY_COLOURS)
    return figure


def _timelines(comparison: Comparison, figure_class: Any) -> Any:
    lanes: list[tuple[str, Sequence[Bar]]] = []
    for r in comparison.results:
        for name, bars in (("measured", r.timeline), ("predicted", r.predicted_timeline)):
            for rank in sorted({bar.rank for bar in bars}):
                lanes.append((f"{r.layout}\n{name}, rank {rank}", [b for b in bars if b.rank == rank]))
    if not lanes:
        return None
    figure, axes = _axes(figure_class, 0.42 * len(lanes) + 0.9, 10.0)
    used: set[str] = set()
    for k, (_, row) in enumerate(lanes):
        for bar in row:
            used.add(bar.kind)
            axes.barh(
                k,
                1e3 * (bar.end - bar.start),
                0.75,
                left=1e3 * bar.start,
                color=BAR_COLOURS.get(bar.kind, "#7a7a7a"),
                hatch="////" if bar.kind in HATCHED else None,
                edgecolor="white",
                linewidth=0.3,
            )
    axes.set_yticks(range(len(lanes)), [_plain(name) for name, _ in lanes], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds from the start of the step")
    _legend(axes, list(used), BAR_COLOURS, BAR_NAMES)
    return figure


def _predictions(comparison: Comparison, figure_class: Any) -> Any:
    ran = [r for r in comparison.results if r.median is not None]
    if not ran:
        return None
    figure = figure_class(figsize=(8, 3.6))
    pairs = [(1e3 * (r.median or 0.0), 1e3 * r.predicted_seconds, r.layout) for r in ran]
    _against(figure.add_subplot(1, 2, 1), pairs, "ms a step")
    held = [(m / MIB, p / MIB, r.layout) for r in ran for p, m in [fullest(r)] if p and m]
    if held:
        _against(figure.add_subplot(1, 2, 2), held, "MiB, fullest rank")
    figure.subplots_adjust(wspace=0.35)
    return figure


def _against(axes: Any, pairs: Sequence[tuple[float, float, str]], unit: str) -> None:
    most = 1.1 * max(max(m, p) for m, p, _ in pairs)
    axes.plot([0, most], [0, most], color="#7a7a7a", linewidth=0.8)
    axes.fill_between([0, most], [0, 0.9 * most], [0, 1.1 * most], color="#7a7a7a", alpha=0.15)
    for measured, predicted, name in pairs:
        axes.plot(measured, predicted, "o", color="#0072b2")
        axes.annotate(_plain(name), (measured, predicted), fontsize=6, xytext=(4, -7), textcoords="offset points")
    axes.set(xlabel=f"measured, {unit}", ylabel="predicted", xlim=(0, most), ylim=(0, most))
    axes.spines[["top", "right"]].set_visible(False)


def _scaling(comparison: Comparison, figure_class: Any) -> Any:
    points = comparison.scaling
    if len(points) < 2:
        return None
    figure, axes = _axes(figure_class, 3.4, 5.5)
    counts = [p.num_devices for p in points]
    predicted = [1e3 * p.predicted_seconds for p in points]
    measured = [(p.num_devices, 1e3 * p.measured_seconds) for p in points if p.measured_seconds is not None]
    first = measured[0][1] * measured[0][0] if measured else predicted[0] * counts[0]
    axes.plot(counts, [first / c for c in counts], "--", color="#7a7a7a", label="perfect scaling")
    axes.plot(counts, predicted, "s-", color="#56b4e9", label="predicted")
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color="#0072b2", label="measured")
    axes.set_xticks(counts, [str(c) for c in counts])
    axes.set(xlabel="devices", ylabel="milliseconds a step", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return figure


def _units(comparison: Comparison, figure_class: Any) -> Any:
    rows = unit_rows(comparison.units)
    if len(rows) < 2:
        return None
    figure, axes = _axes(figure_class, 0.3 * len(rows) + 0.9)
    at = range(len(rows))
    axes.barh([k - 0.2 for k in at], [100 * r.parameter_share for r in rows], 0.38, color="#0072b2", label="parameters")
    axes.barh([k + 0.2 for k in at], [100 * r.time_share for r in rows], 0.38, color="#e69f00", hatch="////",
              edgecolor="white", label="time")  # fmt: skip
    axes.set_yticks(at, [_plain(r.name) for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("percent of the model")
    axes.legend(frameon=False, fontsize=8)
    return figure
