"""The benchmarks: one command that measures both sides and writes ratios; how fast is never tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_quick_mode_writes_finite_ratios(tmp_path: Path) -> None:
    """The quick mode compares one small model on one device, under dp and under pp, with finite ratios."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    rows = {
        row["key"]: row
        for part in ("one-device", "dp", "pipeline")
        for row in json.loads((tmp_path / f"{part}.json").read_text())["rows"]
    }
    compared = {
        "one-device/mlp/dp=1 vs plain loop",
        "dp/mlp/dp=2 vs DDP",
        "exactness/mlp/dp=2 vs dp=2 fast",
        "exactness/mlp/dp=2 in parts vs dp=2 in parts fast",
        "pipeline/mlp/pp=2,1f1b vs Schedule1F1B",
    }
    assert set(rows) == compared | {"bubble/mlp/1f1b"}
    assert all(math.isfinite(rows[key]["ratio"]) and rows[key]["ratio"] > 0 for key in compared)
    assert all(0 <= rows["bubble/mlp/1f1b"][side] < 1 for side in ("meshwise", "stock", "replayed", "theory"))
