"""How soon a rank can begin: what is imported before it is forked, what is not, and when that starts."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshwise as mw
from meshwise.launch import forkserver, memory, settings
from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.training import warm_for

pytestmark = pytest.mark.timeout(120)
COMPILER = "torch._dynamo"


def run(function: Any, num_ranks: int) -> list[Any]:
    return run_ranks(function, num_ranks, device="cpu", timeout=60)


@pytest.mark.parametrize("name", forkserver.PRELOAD)
def test_what_is_preloaded_exists(name: str) -> None:
    """A name that does not exist would be passed over in silence, and each rank would import it by itself."""
    assert importlib.util.find_spec(name) is not None


def make_job() -> mw.Job:
    return mw.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        train_data=TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long)),
        batch_size=8,
        microbatch_size=4,
        clip_grad_norm=1.0,
    )


def test_a_rank_imports_nothing_large_up_to_its_first_step() -> None:
    """All of meshwise that a step needs is there when a rank is forked, and torch's compiler is never imported."""
    job = make_job()

    def step(context: RankContext) -> tuple[list[str], bool]:
        before = set(sys.modules)
        with mw.Session(job, "dp=2", device=context.device) as session:
            session.step(next(session.batches()))
        return [name for name in set(sys.modules) - before if name.startswith("meshwise")], COMPILER in sys.modules

    assert run(step, 2) == [([], False)] * 2


def _train(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad", "NAdam"])
def test_optimizers_do_the_same_without_and_with_the_compiler(kind: str) -> None:
    """An optimizer in a rank steps without torch's compiler, goes on as torch wrote it once that is imported."""

    def both(context: RankContext) -> tuple[torch.Tensor, bool]:
        weight = nn.Parameter(torch.arange(6.0))
        optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
        _train(optimizer)
        without = COMPILER not in sys.modules
        importlib.import_module(COMPILER)
        for _ in range(2):
            _train(optimizer)
        return weight.detach(), without

    weight = nn.Parameter(torch.arange(6.0))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    for _ in range(3):
        _train(optimizer)
    there, without = run(both, 1)[0]
    assert without and torch.equal(there, weight.detach())


def test_a_rank_can_compile() -> None:
    """torch's compiler works in a rank as anywhere, an optimizer's step beside it."""

    def compiled(context: RankContext) -> float:
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        call = torch.compile(layer, backend="eager")
        loss = call(torch.ones(3, 2)).sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    assert len(run(compiled, 1)) == 1


def test_deterministic_algorithms_reach_a_rank() -> None:
    """A setting that differs from torch's own is set in the ranks."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        there = run(lambda _: settings.current(), 1)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert there["deterministic"] and there["warn_only"]


def test_the_front_needs_no_torch() -> None:
    """The command line and the training module can start what ranks are forked from before torch is imported."""
    code = "import sys, meshwise.cli, meshwise.training; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("layout", "devices", "variables", "expected"),
    [
        ("dp=2", None, {}, True),
        ("auto", 3, {}, True),
        (mw.Layout(pp=2), None, {}, True),
        ("auto", 1, {}, False),
        ("dp=1", None, {}, False),
        ("dp=2", 3, {}, False),
        ("nonsense", None, {}, False),
        ("dp=2", None, {"RANK": "0", "WORLD_SIZE": "2"}, False),
        ("dp=2", None, {"MESHWISE_RANK": "0"}, False),
    ],
)
def test_the_forkserver_starts_early_only_where_ranks_will(
    layout: Any, devices: int | None, variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device, a rank, torchrun and a layout that is wrong start nothing."""
    for name in forkserver.STARTED_BY:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started: list[bool] = []
    monkeypatch.setattr(forkserver, "warm", lambda: started.append(True))
    warm_for(layout, devices)
    assert bool(started) == expected


def test_the_forkserver_has_one_thread() -> None:
    """Nothing that is preloaded starts a thread: it would not survive the fork."""
    if forkserver.start_context().get_start_method() != "forkserver":
        pytest.skip("ranks are spawned here")
    parent = run(lambda _: os.getppid(), 1)[0]
    assert len(os.listdir(f"/proc/{parent}/task")) == 1


def test_memory_is_kept_only_while_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes on after training has its freed memory given back, and the user's own choice is left."""
    for name in memory.CHOICES:
        monkeypatch.delenv(name, raising=False)
    calls: list[tuple[Any, ...]] = []
    library = {
        "mallopt": lambda *values: calls.append(values) or 1,
        "malloc_trim": lambda pad: calls.append(("trim", pad)) or 1,
    }
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace(**library))
    with memory.freed_memory_kept():
        kept = list(calls)
    assert kept == [(memory.TRIM_THRESHOLD, memory.LARGEST_TRIM), (memory.MMAP_THRESHOLD, memory.LARGEST_MMAP)]
    assert calls[2:] == [(memory.TRIM_THRESHOLD, memory.USUAL_TRIM), ("trim", 0)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    with memory.freed_memory_kept():
        pass
    assert len(calls) == 4
