"""Waiting for another process: whether it lives, how long to wait, and blocks that are given back."""


from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.parallel import semaphores
from meshwise.parallel.arena import Arena, Borrowed, block_size
from meshwise.parallel.connect import connect
from meshwise.parallel.segment import Segment
from meshwise.parallel.shared import INLINE, SharedTransport

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name needs Linux"),
]
Results = Generator[None, None, list[Any]]
CPU = torch.device("cpu")
BIG = 100_003  # bytes that do not fit in a slot


def in_ranks(function: Callable[[SharedTransport, RankContext], Any], num_ranks: int) -> list[Any]:
    """Run a function in ranks that must share memory."""

    def job(context: RankContext) -> Any:
        os.environ["MESHWISE_TRANSPORT"] = "shared"
        transport = connect(context.rank, [], context.device)
        assert isinstance(transport, SharedTransport)
        return function(transport, context)

    return run_ranks(job, num_ranks, device="cpu", timeout=60)


# ---- the life of another process ---------------------------------------------------------------------------


@pytest.mark.parametrize("handles", [True, False], ids=["by handle", "by number"])
def test_the_end_of_a_process_is_seen(handles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process lives until it ends: also before its parent has heard of it, and where the kernel gives no handles."""
    if not handles:
        monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = semaphores._Process(child.pid)
    assert (watched.handle is not None) == handles and watched.lives()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, its number not given back
    assert not watched.lives()
    child.communicate()
    assert not watched.lives()


def test_a_later_process_of_the_same_number_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel gives no handles, a process that began at another time is not the one that was watched."""
    monkeypatch.delattr(os, "pidfd_open")
    watched = semaphores._Process(os.getpid())
    assert watched.lives() and watched.begun is not None
    watched.begun -= 1
    assert not watched.lives()


def test_a_process_with_many_files_can_wait() -> None:
    """Whether another lives is also seen by a process whose files have numbers from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this system allows too few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        watched = semaphores._Process(os.getpid())
        assert watched.handle is not None
        high = fcntl.fcntl(watched.handle, fcntl.F_DUPFD_CLOEXEC, 1500)
        os.close(watched.handle)
        watched.handle = high
        assert watched.lives()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wait_works_without_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an older C library a wait goes by the wall's clock: it ends when its time is up, or with a post."""
    libc = SimpleNamespace(sem_timedwait=semaphores._blocking.sem_timedwait)
    monkeypatch.setattr(semaphores, "_blocking", libc)
    segment = Segment.create(64)
    address = segment.bytes.data_ptr()
    semaphores._timed_call.cache_clear()
    try:
        ctypes.CDLL(None).sem_init(ctypes.c_void_p(address), 1, 0)
        assert not semaphores._take_within(address, 0.01)
        semaphores.post(address)
        assert semaphores._take_within(address, 10)
    finally:
        semaphores._timed_call.cache_clear()


# ---- blocks ------------------------------------------------------------------------------------------------


def borrow(arena: Arena, borrowed: Borrowed, num_bytes: int) -> Tensor:
    """Take a block of an arena, and give it as a receiver sees it."""
    block = arena.take(num_bytes)
    if (0, block.segment) not in borrowed.segments:
        borrowed.add(0, block.segment, arena.segments[block.segment].address)
    return borrowed.tensor(0, block.segment, block.at, num_bytes)


def test_a_block_is_free_once_no_tensor_uses_it() -> None:
    """A view of a view keeps a block taken; the block is used again after the last of them is gone."""
    arena, borrowed = Arena(), Borrowed()
    held = [borrow(arena, borrowed, BIG) for _ in range(4)]
    view = held[2].view(-1)[10:20].clone(), held[2][10:20].view(2, 5)
    places = {t.data_ptr() for t in held}
    assert len(places) == 4 and len(arena.segments) == 1
    del held
    again = [borrow(arena, borrowed, BIG) for _ in range(3)]
    assert {t.data_ptr() for t in again} == places - {view[1].data_ptr() - 10}
    another = borrow(arena, borrowed, BIG)
    assert len(arena.segments) == 2 and another.data_ptr() not in places


def test_a_child_process_gives_no_block_back() -> None:
    """What a loader's worker inherits of received tensors is not its own to give back: a block is given back once."""
    arena, borrowed = Arena(), Borrowed()
    holder = [borrow(arena, borrowed, BIG)]
    child = multiprocessing.get_context("fork").Process(target=holder.clear, daemon=True)
    child.start()
    child.join(10)
    assert child.exitcode == 0
    places = [borrow(arena, borrowed, BIG) for _ in range(6)]
    assert len({t.data_ptr() for t in [*holder, *places]}) == 7


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, INLINE + 1, BIG, (1 << 20) + 1, 3 << 20])
def test_a_block_wastes_at_most_an_eighth(num_bytes: int) -> None:
    """Blocks have few sizes, whole cache lines, and at most an eighth (or a line) more than is asked for."""
    size = block_size(num_bytes)
    assert size % 64 == 0 and num_bytes <= size <= max(num_bytes * 9 / 8, num_bytes + 63)
    assert block_size(size) == size


def test_sizes_of_all_kinds_need_few_types() -> None:
    """A receiver of ever other sizes keeps nothing for each of them, and sees just the bytes that were sent."""
    arena, borrowed = Arena(), Borrowed()
    sizes = range(1 << 16, 1 << 17, 997)
    for size in sizes:
        assert len(borrow(arena, borrowed, size)) == size
    assert len(borrowed.kinds) == len(arena.blocks) <= 9 < len(sizes)
