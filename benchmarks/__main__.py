"""The one command: ``python -m benchmarks`` measures, prints one table, and writes JSON and a picture.

One thread a rank, data in memory, all contenders of a comparison in turns within one run, medians. Each contender
has processes of its own, started as its users start them, since the settings of a process count too. ``--quick`` is
a smoke test of one small model without peers; ``--full`` measures every case in every part; ``--part`` and ``--case``
choose. What a peer that is not there would need is in ``benchmarks/peers.txt``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .cases import CASES
from .devices import one_device
from .machine import facts
from .measure import Effort, Row
from .picture import draw
from .pipeline import COUNTS, STOCK, pipelines
from .replicas import exactness, four_ranks, replicas
from .startup import startup
from .table import print_row, print_table
from .transport import transport

# The parts in the order of their weight, and the cases that each measures unless told otherwise.
PARTS: dict[str, tuple[str, ...]] = {
    "dp": ("mlp", "wide-mlp", "vgg16-64", "decoder", "resnet50-96", "vgg16-224"),
    "dp=4": ("mlp", "wide-mlp"),
    "transport": (),
    "one-device": ("mlp", "wide-mlp", "decoder", "vgg16-64"),
    "pipeline": ("mlp", "wide-mlp", "decoder"),
    "exactness": ("mlp", "wide-mlp", "decoder"),
    "start-up": (),
}
QUICK = ("dp", "one-device", "pipeline")
OUT = Path(__file__).resolve().parent / "out"


def main() -> None:
    """Measure what the command line asks for."""
    args = _arguments()
    effort = Effort.quick() if args.quick else Effort(blocks=args.blocks, seconds=args.seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    machine, start, rows = facts(), time.monotonic(), []
    for part in args.part or (QUICK if args.quick else PARTS):
        begun, found = time.monotonic(), []
        for row in _measure(part, args, effort):
            print_row(row)
            found.append(row)
        rows += found
        _write(args.out / f"{part}.json", machine, found, time.monotonic() - begun)
        _write(args.out / "table.json", machine, rows, time.monotonic() - start)
    print_table(rows)
    print(f"{time.monotonic() - start:.0f} s on {machine['processor']}, {machine['cores']} cores")
    print(draw(rows, args.out / "ratios.svg"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model, short blocks, no peers")
    parser.add_argument("--full", action="store_true", help="every case in every part")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--schedule", action="append", choices=list(STOCK))
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each contender (default 7)")
    parser.add_argument("--seconds", type=float, default=0.5, help="least seconds of a block (default 0.5)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files and the picture")
    return parser.parse_args()


def _measure(part: str, args: argparse.Namespace, effort: Effort) -> Iterator[Row]:
    names = args.case or (["mlp"] if args.quick else list(CASES) if args.full else PARTS[part])
    schedules = args.schedule or (["1f1b"] if args.quick else list(STOCK))
    cut = [name for name in names if CASES[name].cuts]
    measure: dict[str, Callable[[], Iterator[Row]]] = {
        "dp": lambda: replicas(names, effort, peers=not args.quick),
        "dp=4": lambda: four_ranks(names, effort),
        "transport": lambda: transport(effort),
        "one-device": lambda: one_device(names, effort),
        "pipeline": lambda: pipelines(cut, effort, schedules, (4,) if args.quick else COUNTS),
        "exactness": lambda: exactness(names, effort),
        "start-up": lambda: startup(1 if args.quick else 5),
    }
    return measure[part]()


def _write(path: Path, machine: dict[str, object], rows: Sequence[Row], seconds: float) -> None:
    data = {"machine": machine, "seconds": seconds, "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
