"""Ranks that fail: the first error is the one shown, and no process is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import meshwise
from machine import soon
from meshwise.errors import LaunchError, LayoutError, RankError
from meshwise.launch import failures
from meshwise.launch.failures import Failure
from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext

pytestmark = pytest.mark.timeout(120)
SOURCE = str(Path(next(iter(meshwise.__path__))).parent)
Job = Callable[[RankContext], Any]


def run(function: Job, num_ranks: int, timeout: float = 60, **options: Any) -> list[Any]:
    return run_ranks(function, num_ranks, device="cpu", timeout=timeout, **options)


def exchange_until(leave: Callable[[], Any]) -> Job:
    """Make a job in which rank 1 does something else at step 2 while the others go on exchanging."""

    def job(context: RankContext) -> Any:
        context.emit(os.getpid())
        for step in range(5):
            if context.rank == 1 and step == 2:
                return leave()
            dist.all_reduce(torch.ones(1))
        return None

    return job


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Start the forkserver before the first deadline counts."""
    run(lambda _: None, 1)


def alive(pids: list[int]) -> list[int]:
    return [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


def raise_it() -> None:
    raise ValueError("bad sample at step 2")


@pytest.mark.parametrize(
    ("leave", "first_line"),
    [
        (raise_it, "rank 1: ValueError: bad sample at step 2"),
        (lambda: sys.exit(3), "rank 1 left with exit code 3 before the job was finished"),
        (lambda: os._exit(4), "rank 1 left with exit code 4 before the job was finished"),
        (lambda: os._exit(0), "rank 1 left with exit code 0 before the job was finished"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was ended by signal 9 (SIGKILL)"),
        (lambda: None, "rank 1 returned while rank "),
    ],
    ids=["raise", "sys.exit", "os._exit", "os._exit(0)", "SIGKILL", "return"],
)
def test_the_first_failure_ends_the_job_and_is_shown(leave: Callable[[], Any], first_line: str) -> None:
    """One rank goes while two wait in an exchange: its reason comes first and all are gone at once (B077)."""
    pids: list[int] = []
    with pytest.raises(RankError) as caught:
        run(exchange_until(leave), 3, timeout=15, on_event=pids.append)
    assert str(caught.value).splitlines()[0].startswith(first_line)
    assert caught.value.rank == 1
    assert len(pids) == 3 and alive(pids) == []


def test_the_original_exception_and_its_traceback_are_kept() -> None:
    """The error names the line that raised in the rank, and the exception itself is its cause."""
    with pytest.raises(RankError) as caught:
        run(exchange_until(raise_it), 2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'raise ValueError("bad sample at step 2")' in caught.value.details
    assert "meshwise/launch" not in caught.value.details


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_an_exception_that_cannot_travel_is_still_told() -> None:
    """An exception that pickle cannot rebuild is reported by its type and text."""

    def job(context: RankContext) -> None:
        raise TwoArguments("first ", "second")

    with pytest.raises(RankError, match="^rank 0: TwoArguments: first second"):
        run(job, 1)


def test_an_error_of_meshwise_keeps_its_type() -> None:
    """An error that meshwise itself raised in a rank can be caught as what it is."""

    def job(context: RankContext) -> None:
        if context.rank == 1:
            raise LayoutError("tp=3 does not fit")
        dist.barrier()

    with pytest.raises(LayoutError) as caught:
        run(job, 2)
    assert str(caught.value) == "rank 1: tp=3 does not fit"


def test_the_job_stops_when_its_time_is_up() -> None:
    """After the timeout the ranks that had not finished are named, and gone."""
    pids: list[int] = []

    def job(context: RankContext) -> None:
        context.emit(os.getpid())
        if context.rank == 1:
            signal.pause()

    with pytest.raises(LaunchError, match=r"with 1 of 3 ranks unfinished \(rank 1\)"):
        run(job, 3, timeout=5, on_event=pids.append)
    assert len(pids) == 3 and alive(pids) == []


def test_a_listener_that_raises_ends_the_job() -> None:
    """An error in the parent's own listener passes through unchanged, and no rank is left."""
    pids: list[int] = []

    def listen(pid: int) -> None:
        pids.append(pid)
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        run(exchange_until(signal.pause), 2, on_event=listen)
    assert alive(pids) == []


def test_a_result_that_cannot_be_sent_is_named() -> None:
    """A rank that returns what no process can take over says which part of it that is."""
    with pytest.raises(LaunchError, match=r"^rank 0: the result\.file \(TextIOWrapper\) cannot be sent"):
        run(_open_file, 1)


def _open_file(context: RankContext) -> SimpleNamespace:
    return SimpleNamespace(file=open(os.devnull))


def test_workers_of_a_rank_do_not_outlive_the_job() -> None:
    """Persistent loader workers are gone when the job returns, and when their rank is killed."""
    pids: list[int] = []
    for end in (lambda: None, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        try:
            run(_with_workers(end), 1, on_event=pids.extend)
        except RankError as error:
            assert "SIGKILL" in str(error)
    assert len(pids) == 4
    assert soon(lambda: alive(pids) == [])


def _with_workers(end: Callable[[], Any]) -> Job:
    def job(context: RankContext) -> None:
        data = TensorDataset(torch.arange(8.0))
        iterator = iter(DataLoader(data, batch_size=1, num_workers=2, persistent_workers=True))
        next(iterator)
        context.emit([child.pid for child in psutil.Process().children()])
        end()

    return job


ENDLESS_SCRIPT = """
import signal, torch, torch.distributed as dist
from torch.utils.data import DataLoader
from meshwise.launch.local import run_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(2)
def train(context):
    for step, batch in enumerate(DataLoader(Endless(), batch_size=4, num_workers=2)):
        dist.all_reduce(batch)
        if step == 3:
            context.emit("running")
run_ranks(train, 3, device="cpu", on_event=lambda event: print(event, flush=True))
"""


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a program of 3 ranks with 2 loader workers each, wait until it trains, and name its tag."""
    (tmp_path / "script.py").write_text(ENDLESS_SCRIPT)
    tag = uuid.uuid4().hex
    variables = os.environ | {"PYTHONPATH": SOURCE, "MESHWISE_TEST_TAG": tag, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(3)] == ["running\n"] * 3
        yield program, tag
        program.kill()
        for process in tagged(tag):
            process.kill()


def tagged(tag: str) -> list[psutil.Process]:
    """Find every process that was started with a tag in its environment."""
    return [process for process in psutil.process_iter() if _tag_of(process) == tag]


def _tag_of(process: psutil.Process) -> str | None:
    try:
        tag: str | None = process.environ().get("MESHWISE_TEST_TAG")
    except psutil.Error:  # gone, a zombie, or of another user
        return None
    return tag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_parent_ends_every_descendant(
    endless: tuple[subprocess.Popen[str], str], number: signal.Signals, tmp_path: Path
) -> None:
    """Ctrl-C, a polite and a hard kill of the parent leave no rank, worker or helper (B078)."""
    program, tag = endless
    assert len(tagged(tag)) >= 1 + 3 + 6
    program.send_signal(number)
    assert soon(lambda: tagged(tag) == []), [process.cmdline() for process in tagged(tag)]
    assert program.wait(timeout=10) == -number
    assert not list(tmp_path.glob("meshwise-*"))


def failure(rank: int, seconds: float, secondary: bool = False) -> Failure:
    return Failure(rank=rank, seconds=seconds, kind="Error", message="", secondary=secondary)


def test_a_cause_wins_over_an_earlier_lost_connection() -> None:
    """The earliest failure is shown, but a lost connection only where nothing explains it."""
    assert failures.first([failure(0, 1.0, True), failure(1, 2.0), failure(2, 3.0)]).rank == 1
    assert failures.first([failure(0, 2.0, True), failure(1, 1.0, True)]).rank == 1


def test_an_error_raised_from_a_lost_connection_is_one() -> None:
    """A user's error that was raised because another rank is gone does not count as the cause."""
    try:
        try:
            raise RuntimeError("pair.cc:553 Connection closed by peer [127.0.0.1]:9358")
        except RuntimeError as lost:
            raise KeyError("no value") from lost
    except KeyError as error:
        assert failures.lost_peer(error)
    assert not failures.lost_peer(KeyError("no value"))


@pytest.mark.parametrize(
    ("code", "text"),
    [(-11, "was ended by signal 11 (SIGSEGV)"), (5, "left with exit code 5 before the job was finished")],
)
def test_a_death_is_told_by_its_signal_or_code(code: int, text: str) -> None:
    """A rank that said nothing is described by how the system saw it end."""
    assert str(failures.death(2, code, 0.0)) == f"rank 2 {text}"
