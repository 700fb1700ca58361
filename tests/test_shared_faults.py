"""Shared memory and faults: who is blamed, what happens where memory is short, and that nothing is ever left."""

from __future__ import annotations

import logging
import os
import random
import resource
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwise as mw
from machine import soon
from meshwise.errors import LayoutError, RankError
from meshwise.job import Job
from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.parallel.connect import _deadline, connect
from meshwise.parallel.segment import Segment, SharedMemoryError
from meshwise.parallel.semaphores import PeerLostError
from meshwise.parallel.shared import SLOTS, SharedTransport
from meshwise.parallel.transport import ProcessGroupTransport
from scenarios import adamw, make_job, random_rows, same, train_in_memory
from test_launch_faults import SOURCE, alive, tagged

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name needs Linux"),
]
BIG = 100_000  # elements that do not fit in a slot
SHORT = 100_000  # bytes that are too few for the ranks' control segment


def run(function: Callable[[RankContext], Any], num_ranks: int, **options: Any) -> list[Any]:
    return run_ranks(function, num_ranks, device="cpu", timeout=60, **options)


@pytest.fixture(autouse=True)
def _demand_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no rank fall back to sockets unless the test says so."""
    monkeypatch.setenv("MESHWISE_TRANSPORT", "shared")


# ---- who is blamed -----------------------------------------------------------------------------------------


def wait_for_rank_1(transport: SharedTransport) -> None:
    """Wait for rank 1 in another way on each rank: for a message, for room in a full ring, for a meeting, a sum."""
    if transport.rank == 0:
        transport.receive(8, 1, 1).wait()
    elif transport.rank == 2:
        for _ in range(SLOTS + 5):
            transport.send(torch.zeros(1), 1, 1)
        transport.flush()
    elif transport.rank == 3:
        transport.meet((1, 3)).wait()
    else:
        transport.all_reduce(torch.zeros(BIG), (1, 4)).wait()


def lose_rank_1(leave: Callable[[], Any]) -> Callable[[RankContext], Any]:
    """Make a job in which rank 1 leaves while others wait for it; they tell what that looks like to them."""

    def job(context: RankContext) -> None:
        transport = connect(context.rank, [], context.device)
        assert isinstance(transport, SharedTransport)
        context.emit(os.getpid())
        dist.barrier()
        if context.rank == 1:
            leave()
        try:
            wait_for_rank_1(transport)
        except PeerLostError as error:
            context.emit(str(error))
            raise

    return job


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_it() -> None:
    raise ValueError("bad sample at step 2")


@pytest.mark.parametrize(
    ("num_ranks", "leave", "first_line"),
    [
        (5, kill_self, "rank 1 was ended by signal 9 (SIGKILL)"),
        (2, raise_it, "rank 1: ValueError: bad sample at step 2"),
    ],
    ids=["SIGKILL", "raise"],
)
def test_the_rank_that_left_is_named_first(num_ranks: int, leave: Callable[[], Any], first_line: str) -> None:
    """Ranks that wait in any way for one that is gone end at once; the one that left is named, not they."""
    heard: list[Any] = []
    with pytest.raises(RankError) as caught:
        run(lose_rank_1(leave), num_ranks, on_event=heard.append)
    assert str(caught.value).splitlines()[0] == first_line and caught.value.rank == 1
    pids = [event for event in heard if isinstance(event, int)]
    assert len(pids) == num_ranks and alive(pids) == []
    if leave is kill_self:  # with a raise the launcher may end the others before they say anything
        told = {event for event in heard if isinstance(event, str)}
        assert told == {f"connection closed by peer: rank 1 ended, and rank {r} waits for it" for r in (0, 2, 3, 4)}


def send_and_die(context: RankContext) -> None:
    """Let rank 1 send a large tensor and die; rank 0 takes it after that."""
    transport = connect(context.rank, [], context.device)
    pids: list[Any] = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    handle = os.pidfd_open(pids[1])
    dist.barrier()
    if context.rank == 1:
        transport.send(torch.ones(BIG), 0, 1)
        kill_self()
    assert select.select([handle], [], [], 30)[0]
    transport.receive(4 * BIG, 1, 1).wait()


def test_memory_that_went_with_its_rank_is_not_the_cause() -> None:
    """A rank that finds the sender of a large tensor gone before it could map it does not take the blame."""
    with pytest.raises(RankError) as caught:
        run(send_and_die, 2)
    assert str(caught.value).splitlines()[0] == "rank 1 was ended by signal 9 (SIGKILL)"


# ---- a rank that is slow, memory that is short -----------------------------------------------------------------


def short_of(num_bytes: int) -> None:
    """Let this process make no file larger than so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def troubles(context: RankContext) -> dict[str, Any]:
    """Meet what does not end a job: a peer that is slow, and memory that cannot be had."""
    transport, found = connect(context.rank, [], context.device), {}
    assert isinstance(transport, SharedTransport)
    if context.rank == 0:
        transport.waiter.deadline = 0.01
        with pytest.raises(TimeoutError) as slow:
            transport.receive(8, 1, 1).wait()
        found["slow"], transport.waiter.deadline = str(slow.value), 60
    dist.barrier()
    found["whole"] = transport.share(BIG, (0, 1)).wait() is not None and transport.note == ""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    short_of(BIG if context.rank == 0 else unlimited)
    found["maker"] = transport.share(10 * BIG, (0, 1)).wait(), transport.note
    short_of(unlimited)
    attach = Segment.attach
    if context.rank == 1:
        Segment.attach = lambda address: attach(_elsewhere(address))  # type: ignore[method-assign,assignment]
    found["other"] = transport.share(BIG, (0, 1)).wait(), transport.note
    Segment.attach = attach  # type: ignore[method-assign]
    segment = transport.share(BIG, (0, 1)).wait()
    segment.bytes[context.rank] = 1
    transport.meet((0, 1)).wait()
    found["after"] = segment.bytes[:2].tolist(), transport.note
    return found


def _elsewhere(address: Any) -> Any:
    from dataclasses import replace

    return replace(address, path="/proc/1/fd/none")


def test_troubles_are_told_and_passed() -> None:
    """A slow peer is named after the deadline; a segment that one rank cannot have, none has, and all know why."""
    first, second = run(troubles, 2)
    assert first["slow"].startswith("rank 0 has waited 0.01 seconds for rank 1, which is alive: ")
    for found in (first, second):
        assert found["whole"]
        assert found["maker"][0] is None and "1.0 MiB of shared memory cannot be had here" in found["maker"][1]
        assert found["other"][0] is None and "another rank's memory cannot be mapped" in found["other"][1]
        assert found["after"] == ([1, 1], "")


class Net(nn.Module):
    """Two layers, one of them larger than a slot of the ring."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 300), nn.Linear(300, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map 20 features to 3."""
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def small_job(**fields: Any) -> Job:
    data = [(random_rows(20, seed=k).float(), random_rows(3, seed=k + 100).float()) for k in range(24)]
    return make_job(Net, data, batch_size=8, microbatch_size=2, optimizer=adamw(), **fields)


def train_short(num_bytes: int, where: int) -> Callable[[RankContext], Any]:
    """Make a job that trains 3 steps while one rank can make no larger files; gives weights, warnings, the kind."""

    def job(context: RankContext) -> Any:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("meshwise").addHandler(handler)
        if context.rank == where:
            short_of(num_bytes)
        with mw.Session(small_job(), "dp=2") as session:
            for batch in session.batches():
                session.step(batch)
            weights = {n: p.detach().clone() for n, p in session.model.named_parameters()}
            kind = type(session.worker.transport).__name__
            assert not session.worker.engine.commons.active
        return weights, heard, kind, session.step_index

    return job


@pytest.mark.parametrize("where", [0, 1])
def test_training_goes_on_through_sockets(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory cannot be had for the ranks' rings, they use sockets: one warning line, and the same bits."""
    monkeypatch.setenv("MESHWISE_TRANSPORT", "auto")
    job = train_short(SHORT, where)
    if where == 1:
        job = _refuse_attach(job)
    expected = train_in_memory(small_job(), "dp=1").params
    found = run(job, 2)
    assert [kind for _, _, kind, _ in found] == [ProcessGroupTransport.__name__] * 2
    for weights, _, _, steps in found:
        assert steps == 3 and all(same(weights[name], expected[name]) for name in expected)
    (line,) = [line for _, heard, _, _ in found for line in heard]
    assert line.startswith("ranks exchange data through sockets, not shared memory: ")
    assert "cannot be had here (File too large)" in line or "cannot be mapped" in line


def _refuse_attach(job: Callable[[RankContext], Any]) -> Callable[[RankContext], Any]:
    """Let rank 1 map no memory of another rank."""

    def refused(context: RankContext) -> Any:
        if context.rank == 1:
            attach = Segment.attach
            Segment.attach = lambda address: attach(_elsewhere(address))  # type: ignore[method-assign,assignment]
        return job(context)

    return refused


def refuse_the(number: int) -> Callable[[RankContext], Any]:
    """Let rank 0 have no memory when it asks for the n-th time, and train."""

    def job(context: RankContext) -> Any:
        create, asked = Segment.create, []

        def maybe(num_bytes: int) -> Segment:
            asked.append(num_bytes)
            if context.rank == 0 and len(asked) == number:
                raise SharedMemoryError("no more")
            return create(num_bytes)

        Segment.create = maybe  # type: ignore[method-assign,assignment]
        return train_short(1 << 40, 0)(context)

    return job


@pytest.mark.parametrize("number", [2, 3], ids=["parameters", "gradients"])
def test_training_goes_on_through_messages(number: int) -> None:
    """Where memory cannot be had for parameters, or later for gradients, replicas exchange messages: the same bits."""
    expected = train_in_memory(small_job(), "dp=1").params
    for weights, heard, kind, steps in run(refuse_the(number), 2):
        assert kind == SharedTransport.__name__ and steps == 3 and heard == []
        assert all(same(weights[name], expected[name]) for name in expected)


def test_what_is_demanded_is_not_replaced() -> None:
    """With MESHWISE_TRANSPORT=shared ranks that cannot share memory are refused, and told why."""
    with pytest.raises(LayoutError, match="MESHWISE_TRANSPORT=shared, but ranks cannot share memory: .*File too large"):
        run(train_short(SHORT, 0), 2)


def test_an_unknown_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt choice is refused with the possible ones."""
    monkeypatch.setenv("MESHWISE_TRANSPORT", "shm")
    with pytest.raises(LayoutError, match="MESHWISE_TRANSPORT='shm' is not one of auto, shared, gloo."):
        run(train_short(SHORT, 0), 2)


@pytest.mark.parametrize("text", ["soon", "0", "nan", "-3"])
def test_a_deadline_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline has to be a number of seconds."""
    monkeypatch.setenv("MESHWISE_DEADLINE", text)
    with pytest.raises(LayoutError, match=f"MESHWISE_DEADLINE='{text}' is not a number of seconds above 0."):
        _deadline()


def test_the_deadline_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait as long as MESHWISE_DEADLINE says."""
    monkeypatch.setenv("MESHWISE_DEADLINE", "77.5")
    assert run(lambda context: connect(context.rank, [], context.device).waiter.deadline, 2) == [77.5] * 2


# ---- nothing is left -------------------------------------------------------------------------------------------


def own_memory(pid: int | str) -> set[int]:
    """List the inodes of the shared memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if "memfd:meshwise" in line}


def all_memory() -> set[int]:
    """List the inodes of the shared memory that any process maps."""
    return {inode for pid in psutil.pids() for inode in own_memory(pid)}


@pytest.fixture
def nothing_left() -> Iterator[Callable[[list[int], set[int]], None]]:
    """Give a check that processes and memory are gone, and that /dev/shm is as it was."""
    before = set(os.listdir("/dev/shm"))

    def check(pids: list[int], inodes: set[int]) -> None:
        assert pids and inodes
        assert soon(lambda: alive(pids) == []), pids
        assert soon(lambda: not inodes & all_memory())
        assert soon(lambda: set(os.listdir("/dev/shm")) <= before), set(os.listdir("/dev/shm")) - before

    yield check


def train_until(leave: Callable[[int, int], Any]) -> Callable[[RankContext], Any]:
    """Make a job that trains step after step, and asks before each (rank, step) whether to go on."""

    def job(context: RankContext) -> None:
        with mw.Session(small_job(epochs=1000), "dp=2") as session:
            for batch in session.batches():
                if session.step_index == 2:
                    context.emit((context.rank, os.getpid(), own_memory("self")))
                if leave(context.rank, session.step_index) or session.step(batch) is None:
                    break
                context.emit(None)

    return job


class Listener:
    """Note the ranks' processes and memory, and kill some of them after so many events."""

    def __init__(self, victims: tuple[int, ...] = (), after: int = 0) -> None:
        self.victims, self.left = victims, after
        self.pids: dict[int, int] = {}
        self.inodes: set[int] = set()

    def __call__(self, event: Any) -> None:
        """Take an event of a rank."""
        if event is not None:
            rank, self.pids[rank], inodes = event
            self.inodes |= inodes
        if len(self.pids) == 2:
            self.left -= 1
            for victim in self.victims if self.left == 0 else ():
                os.kill(self.pids[victim], signal.SIGKILL)


def raise_at_3(rank: int, step: int) -> bool:
    if (rank, step) == (1, 3):
        raise ValueError("at 3")
    return False


def test_nothing_is_left_after_a_normal_end_or_an_error(nothing_left: Any) -> None:
    """Ranks that end by themselves or with an error leave no process, no memory and no name."""
    listener = Listener()
    run(train_until(lambda rank, step: step == 3), 2, on_event=listener)
    nothing_left(list(listener.pids.values()), listener.inodes)
    listener = Listener()
    with pytest.raises(RankError, match="^rank 1: ValueError: at 3"):
        run(train_until(raise_at_3), 2, on_event=listener)
    nothing_left(list(listener.pids.values()), listener.inodes)


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_nothing_is_left_after_a_kill(victims: tuple[int, ...], nothing_left: Any) -> None:
    """A rank, or all of them, killed somewhere in a step: the run ends, names one of them, and nothing is left."""
    listener = Listener(victims, random.randint(1, 60))
    with pytest.raises(RankError) as caught:
        run(train_until(lambda rank, step: False), 2, on_event=listener)
    assert str(caught.value).splitlines()[0] in [f"rank {v} was ended by signal 9 (SIGKILL)" for v in victims]
    nothing_left(list(listener.pids.values()), listener.inodes)


SCRIPT = """
import meshwise as mw
from test_shared_faults import small_job
def say(event):
    if getattr(event, "epoch", 0) >= 1:
        print("running", flush=True)
if __name__ == "__main__":
    mw.train(small_job(epochs=10**6), layout="dp=2", progress=False, listeners=[say])
"""


def test_nothing_is_left_after_a_kill_of_the_parent(tmp_path: Path, nothing_left: Any) -> None:
    """With the program that started them its ranks end too, and their memory with them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    tag = uuid.uuid4().hex
    path = os.pathsep.join([SOURCE, str(Path(__file__).parent)])
    variables = os.environ | {"PYTHONPATH": path, "MESHWISE_TEST_TAG": tag, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "running\n"
        pids = [process.pid for process in tagged(tag)]
        inodes = {inode for pid in pids for inode in own_memory(pid)}
        program.kill()
        try:
            nothing_left(pids, inodes)
        finally:
            for process in tagged(tag):
                process.kill()
