"""Seconds from the command to the end of the first step: meshwise.train against torchrun and DDP."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .measure import Result, Row

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


def startup(repeats: int) -> Iterator[Row]:
    """Start both scripts in turns and compare how long each takes to its first step; and time ``meshwise --help``."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "ours.py", Path(folder) / "theirs.py"
        first.write_text(OURS.replace("RUN", repr(str(Path(folder) / "run"))))
        second.write_text(THEIRS)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        commands = {"meshwise.train": [sys.executable, str(first)], "torchrun DDP": [*torchrun, str(second)]}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                seconds[name].append(_first_step(command))
    found = {name: Result(seconds=tuple(values)) for name, values in seconds.items()}
    yield Row.ratio("start-up", "mlp, command to first step", found, "meshwise.train", "torchrun DDP", 1.00)
    yield _help(repeats)


def _help(repeats: int) -> Row:
    script = Path(sys.executable).parent / "meshwise"
    command = [str(script)] if script.exists() else [sys.executable, "-c", "import meshwise.cli as c; c.main()"]
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([*command, "--help"], check=True, capture_output=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    return Row(
        part="start-up",
        case="command",
        name="meshwise --help",
        value=statistics.median(seconds),
        unit="s",
        target=0.3,
        seconds=tuple(seconds),
    )


def _first_step(command: list[str]) -> float:
    start = time.time()
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in result.stdout.splitlines() if line.startswith("first step")]
    if result.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}\n{result.stderr}")
    return float(lines[0].split()[-1]) - start
