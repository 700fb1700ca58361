"""The benchmarks: one command that measures all contenders in turns and writes ratios; how fast is never tested."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.contender import Contender
from benchmarks.measure import Effort, Result, Row
from benchmarks.turns import compete

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_quick_mode_writes_finite_ratios(tmp_path: Path) -> None:
    """The quick mode compares one small model under dp, on one device and under pp, with finite ratios."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    table = json.loads((tmp_path / "table.json").read_text())
    rows = {row["key"]: row for row in table["rows"]}
    compared = {
        "dp/mlp/meshwise dp=2 vs DDP, best settings",
        *(f"one-device/mlp/meshwise, m={count} vs plain loop" for count in (1, 2, 4, 8)),
        "pipeline/mlp/pp=2, 1f1b, m=4 vs Schedule1F1B, m=4",
    }
    assert set(rows) == compared | {"bubble/mlp/pp=2, 1f1b, m=4"}
    assert all(math.isfinite(row["value"]) for row in rows.values()), [row["note"] for row in rows.values()]
    assert all(rows[key]["value"] > 0 for key in compared)
    assert table["machine"]["cores"] >= 1


@pytest.mark.slow
def test_a_contender_that_cannot_run_is_in_the_result_with_the_reason() -> None:
    """The error of one contender is its note, and the others are measured."""
    fine = Contender(name="fine", kind="plain", case="mlp", ranks=1, options={"batch": 8})
    wrong = Contender(name="wrong", kind="plain", case="no such case", ranks=1, options={"batch": 8})
    found = compete([fine, wrong], Effort.quick())
    assert len(found["fine"].seconds) == Effort.quick().blocks
    assert found["wrong"].seconds == ()
    assert found["wrong"].note.startswith("does not run: KeyError")


def test_a_row_says_whether_its_target_is_met() -> None:
    """A ratio of medians is met at or below its target, a rate at or above it, and nothing is said without one."""
    found = {"a": Result(seconds=(1.0, 2.0, 9.0)), "b": Result(seconds=(4.0, 4.0, 4.0)), "c": Result(note="why")}
    row = Row.ratio("part", "case", found, "a", "b", 0.5)
    assert (row.value, row.verdict) == (0.5, "met")
    assert Row.ratio("part", "case", found, "a", "b", 0.4).verdict == "missed"
    assert Row.ratio("part", "case", found, "a", "b").verdict == ""
    assert Row.ratio("part", "case", found, "c", "b", 0.5).verdict == "no value"
    rate = Row(part="part", case="case", name="rate", value=9.0, unit="GB/s", target=8.0, at_least=True)
    assert rate.verdict == "met"
