"""Seconds from the command to the end of the first step: meshwise.train against torchrun and DDP."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .measure import Row

OURS = """
import time, torch
from torch import nn
from torch.utils.data import TensorDataset
import meshwise as mw
from meshwise.events import EpochEnded, StepEnded

def show(event):
    if isinstance(event, (StepEnded, EpochEnded)):  # steps are not all told
        print("first step", time.time(), flush=True)

if __name__ == "__main__":
    torch.manual_seed(0)
    job = mw.Job(
        model=lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train_data=TensorDataset(torch.randn(1024, 784), torch.randint(0, 10, (1024,))),
        batch_size=128, microbatch_size=64,
    )
    mw.train(job, devices=2, steps=1, progress=False, run=RUN, listeners=[show])
"""

THEIRS = """
import time, torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step", time.time(), flush=True)
dist.destroy_process_group()
"""


def startup(repeats: int) -> list[Row]:
    """Start both scripts in turns and compare how long each takes to its first step."""
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "ours.py", Path(folder) / "theirs.py"
        first.write_text(OURS.replace("RUN", repr(str(Path(folder) / "run"))))
        second.write_text(THEIRS)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        for _ in range(repeats):
            ours.append(_first_step([sys.executable, str(first)]))
            theirs.append(_first_step([*torchrun, str(second)]))
    return [
        Row(
            part="start-up",
            case="mlp",
            meshwise="train",
            alternative="torchrun DDP",
            seconds=tuple(ours),
            alternative_seconds=tuple(theirs),
            target=1.00,
        )
    ]


def _first_step(command: list[str]) -> float:
    start = time.time()
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in result.stdout.splitlines() if line.startswith("first step")]
    if result.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}\n{result.stderr}")
    return float(lines[0].split()[-1]) - start
