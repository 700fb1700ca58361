"""Print how far off predictions are from published runs: ``python -m benchmarks.published RUNS.csv``."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .counting import Unknown
from .rows import Row, by_set, read_rows
from .score import Compared, compare, constant_errors, model_flops, rank_correlation, sweeps, typical

HEAD = ("source", "runs", "time", "signed", "memory", "rank", "constant")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all rows of a file, by source."""
    options = _options(arguments)
    begun = time.perf_counter()
    skipped: collections.Counter[str] = collections.Counter()
    everything: list[Compared] = []
    print(f"{HEAD[0]:28}" + "".join(f"{name:>10}" for name in HEAD[1:]))
    for name, rows in by_set(read_rows(options.path)):
        if options.set and options.set not in name:
            continue
        compared = list(_compared(rows, skipped, options))
        everything += compared
        print_line(name, compared)
        if options.rows:
            print_rows(compared)
    print_line("all", everything)
    for reason, count in skipped.most_common():
        print(f"left out {count:4}: {reason}")
    print(f"{time.perf_counter() - begun:.0f} s")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("path", type=Path, help="a CSV file of published runs")
    parser.add_argument("--set", default="", help="only sources whose name holds this")
    parser.add_argument("--rows", action="store_true", help="print every run")
    parser.add_argument("--raise", dest="raises", action="store_true", help="stop at the first error")
    return parser.parse_args(arguments)


def _compared(rows: Sequence[Row], skipped: collections.Counter[str], options: argparse.Namespace) -> list[Compared]:
    found = []
    for row in rows:
        try:
            found.append(compare(row))
        except Unknown as error:
            skipped[f"{row.set}: {error}"] += 1
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            if options.raises:
                raise
            skipped[f"{row.set}: {type(error).__name__}: {error}"] += 1
    return found


def print_line(name: str, compared: Sequence[Compared]) -> None:
    """Print the errors of one source."""
    times = [c.time_error for c in compared if c.time_error is not None]
    memory = [c.memory_error for c in compared if c.memory_error is not None]
    ranks = [r for g in sweeps(compared) if (r := rank_correlation([(c.prediction.seconds, c.measured or 0) for c in g
             if c.measured])) is not None]  # fmt: skip
    signed = sorted(times)[len(times) // 2] if times else None
    cells = [
        str(len(compared)),
        _percent(typical(times)),
        _percent(signed, signed=True),
        _percent(typical(memory)),
        f"{sum(ranks) / len(ranks):.2f}" if ranks else "",
        _percent(typical(constant_errors([c for c in compared if c.measured], _work)) if times else None),
    ]
    print(f"{name:28}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def _work(compared: Compared) -> float:
    """Give what a constant rate is taken of: the model's FLOPs on a device."""
    row = compared.row
    if row.layers and row.hidden and row.seq:
        return model_flops(row, compared.prediction.tokens) / row.gpus
    return compared.prediction.samples * compared.prediction.flops / row.gpus


def _percent(value: float | None, signed: bool = False) -> str:
    return "" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


def print_rows(compared: Sequence[Compared]) -> None:
    """Print every run of a source."""
    for c in compared:
        r, e = c.row, c.prediction.estimate
        parts = " ".join(f"{k}={v / c.prediction.seconds:.0%}" for k, v in e.time_parts.items() if v > 0.02 * e.seconds)
        memory = f"{c.prediction.num_bytes / 1e9:6.1f} of {r.memory / 1e9:6.1f} GB" if r.memory else ""
        error = "" if c.time_error is None else f"{c.time_error:+.0%}"
        layout = f"tp{r.tp} pp{r.pp} dp{r.dp} mb{r.micro_batch:g} b{r.global_batch} s{r.seq}"
        how = f"{r.act_ckpt[:9]:9} {r.precision[:8]:8}"
        seconds = f"{c.prediction.seconds:8.4f} of {c.measured or 0:8.4f} {error:>6}"
        print(f"  {r.model[:22]:22} {r.gpu[:14]:14} {r.gpus:4} {layout} {how} {seconds} {memory} {parts}")


if __name__ == "__main__":
    sys.exit(main())
