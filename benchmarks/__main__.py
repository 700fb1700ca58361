"""The one command: ``python -m benchmarks`` measures, prints ratios and writes ``benchmarks/out/*.json``.

One thread a rank, data in memory, both sides in turns in the same processes. ``--quick`` is a smoke test
of one small model; ``--full`` adds VGG16 at its full size; ``--part`` and ``--case`` choose.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

import torch  # noqa: E402  (only now, or it would not see the variables)

from meshwise.schedule.library import SCHEDULES  # noqa: E402

from .measure import Effort  # noqa: E402
from .models import CASES, FULL_ONLY  # noqa: E402
from .pipeline import pipelines  # noqa: E402
from .replicas import one_device, replicas  # noqa: E402
from .startup import startup  # noqa: E402

PARTS = ("one-device", "dp", "pipeline", "start-up")
OUT = Path(__file__).resolve().parent / "out"


def main() -> None:
    """Measure what the command line asks for."""
    args = _arguments()
    torch.set_num_threads(1)
    effort = Effort.quick() if args.quick else Effort(blocks=args.blocks, seconds=args.seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.part or (PARTS[:3] if args.quick else PARTS):
        start = time.monotonic()
        found = _measure(part, args, effort)
        facts = {"part": part, "machine": _machine(), "seconds": time.monotonic() - start}
        text = json.dumps({**facts, "rows": [row.as_dict() for row in found]}, indent=1)
        (args.out / f"{part}.json").write_text(text + "\n")
        print("\n".join(map(str, found)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model, short blocks")
    parser.add_argument("--full", action="store_true", help="also VGG16 at 224 x 224")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--schedule", action="append", choices=SCHEDULES)
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each side (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="least seconds of a block (default 1)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files")
    return parser.parse_args()


def _measure(part: str, args: argparse.Namespace, effort: Effort) -> Sequence[Any]:
    names = args.case or [n for n in CASES if args.full or n not in FULL_ONLY]
    if args.quick:
        names = args.case or ["mlp"]
    if part == "one-device":
        return one_device(names, effort)
    if part == "dp":
        return replicas(names, effort)
    if part == "pipeline":
        schedules = args.schedule or (["1f1b"] if args.quick else list(SCHEDULES))
        rows, bubbles = pipelines(names, schedules, effort)
        return [*rows, *bubbles]
    return startup(1 if args.quick else 5)


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
