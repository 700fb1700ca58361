"""A process that the operating system limits: what does not fit is refused with the numbers, what is planned fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resource")

SCRIPT = """
import json, resource, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import meshwise as mw
from meshwise.hardware.limits import occupied
from meshwise.planning import plan
from meshwise.trials import Trial, Turn, run_trials


def model():
    return nn.Sequential(*(l for _ in range(6) for l in (nn.Linear(2048, 2048), nn.ReLU())), nn.Linear(2048, 10))


def job():
    data = TensorDataset(torch.randn(128, 2048), torch.randint(0, 10, (128,)))
    return mw.Job(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
        train_data=data, batch_size=64, microbatch_size=16, name="limited",
    )


if __name__ == "__main__":
    limit = occupied().data + (540 << 20)  # 100 MB of weights, three times that with AdamW, and gradients
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    made = plan(job(), devices=2, measure=False)
    trial = Trial(layout=made.layout, cuts=made.chosen.cuts or None)
    run_trials(job(), [trial], turn=Turn(seconds=0.1, max_steps=5, look=False), turns=1)
    result = mw.train(job(), devices=2, layout=made.layout, steps=2, progress=False, run=sys.argv[1])
    print(json.dumps({
        "layout": str(made.layout), "rejected": [str(r) for r in made.rejected], "error": trial.error,
        "predicted": [m.reserved for m in made.chosen.estimate.memory], "measured": trial.peaks,
        "limit": made.limit_bytes, "steps": result.num_steps,
    }))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("limited")
    (folder / "limited.py").write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MESHWISE_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(folder / "limited.py"), str(folder / "run")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_replicas_are_refused_with_the_numbers(found: dict[str, Any]) -> None:
    """The reason names what dp needs, what there is, and its largest part."""
    reason = next(r for r in found["rejected"] if r.startswith("dp=2:"))
    assert "MiB of " in reason and "on every rank" in reason and "gradients are" in reason


def test_a_pipeline_is_planned_and_trains_within_the_limit(found: dict[str, Any]) -> None:
    """The planned layout is run and trained in the same limited process."""
    assert found["layout"].startswith("pp=2")
    assert found["error"] == "" and found["steps"] == 2


def test_no_rank_takes_more_than_was_predicted(found: dict[str, Any]) -> None:
    """The fullest rank stays below the fullest prediction, and that below the limit."""
    assert max(found["measured"]) <= max(found["predicted"]) <= found["limit"]
