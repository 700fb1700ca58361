"""Semaphores in shared memory: how ranks of one host tell one another that something is there.

POSIX semaphores between processes order memory (what was written before a post is seen after its wait), on every
processor. A wait spins for a moment, since the other rank is mostly just about to post, and then blocks.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 64  # bytes for a semaphore: a cache line of its own (a sem_t has 16 to 32)
SPINS = 400  # tries before blocking where every rank has a core, some 100 microseconds
SLICE_SECONDS = 0.05  # of blocking, between looks at whether the other rank lives
BUSY_SECONDS = 0.001  # the same where this rank itself has something to send that waits for room
DEADLINE_SECONDS = 1800.0  # as torch.distributed's

_here = sys.platform != "win32"  # where a process finds its own C library
# The first keeps the interpreter's lock, so that a call takes a fifth of a microsecond; the second lets it go.
_quick: Any = ctypes.PyDLL(None) if _here else None
_blocking: Any = ctypes.CDLL(None, use_errno=True) if _here else None


class PeerLostError(ConnectionError):
    """Say that another rank ended while this one waited for it; its own error is the cause."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Tell whether the C library has what is needed (Linux has)."""
    return all(hasattr(_quick, name) for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"))


def create(address: int, value: int = 0) -> None:
    """Make a semaphore at an address in shared memory. One process calls it, before any other uses it."""
    if _blocking.sem_init(ctypes.c_void_p(address), 1, value):
        raise OSError(ctypes.get_errno(), "sem_init")


def _quick_call(name: str, *further: Any) -> Any:
    """Give a C function that takes an address, or a stand-in where the platform has none (see :func:`available`)."""
    call = getattr(_quick, name, None)
    if call is not None:
        call.argtypes = [ctypes.c_void_p, *further]
    return call


post = _quick_call("sem_post")  # post(address) adds one; it never waits
copy = _quick_call("memmove", ctypes.c_void_p, ctypes.c_size_t)  # copy(to, source, num_bytes), of few bytes
trywait = _quick_call("sem_trywait")  # trywait(address) takes one and gives 0, or gives -1 at once


def take(address: int) -> bool:
    """Take one if there is one."""
    return not trywait(address)


class Waiter:
    """Wait for what other ranks post; ``meanwhile`` runs when a wait is long, and says whether it has more to do.

    ``spins``: tries before blocking; few where ranks share cores. ``deadline``: the longest wait, in seconds.
    """

    def __init__(self, rank: int, peers: dict[int, int], *, spins: int, deadline: float = DEADLINE_SECONDS) -> None:
        self.rank, self.spins, self.deadline = rank, spins, deadline
        self.peers = {peer: _Process(pid) for peer, pid in peers.items()}
        self.meanwhile: Callable[[], bool] = lambda: False

    def wait(self, address: int, peer: int) -> None:
        """Take one, waiting for ``peer`` to post it.

        Raises PeerLostError when that rank is gone, TimeoutError when it does not post for too long.
        """
        for _ in range(self.spins):
            if not trywait(address):
                return
        self._block(address, peer)

    def _block(self, address: int, peer: int) -> None:
        begun = time.monotonic()
        while True:
            if _take_within(address, BUSY_SECONDS if self.meanwhile() else SLICE_SECONDS):
                return
            if not self.peers[peer].lives():
                if take(address):  # its last words
                    return
                raise self.lost(peer)
            if time.monotonic() - begun > self.deadline:
                raise TimeoutError(
                    f"rank {self.rank} has waited {self.deadline:g} seconds for rank {peer}, which is alive: does it "
                    "do other steps than this one, or does it wait for something else?"
                )

    def lost(self, peer: int) -> PeerLostError:
        """Make the error that says that a rank is gone."""
        return PeerLostError(f"connection closed by peer: rank {peer} ended, and rank {self.rank} waits for it")


def _take_within(address: int, seconds: float) -> bool:
    call, clock = _timed_call()
    until = time.clock_gettime(clock) + seconds
    moment = _Time(int(until), int(until % 1 * 1e9))
    if not call(address, clock, ctypes.byref(moment)):
        return True
    if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "sem_timedwait")
    return False


@functools.cache
def _timed_call() -> tuple[Any, int]:
    """Give the wait with a deadline, and its clock: one that nobody sets, where the C library has it (glibc 2.30)."""
    if hasattr(_blocking, "sem_clockwait"):
        _blocking.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        return _blocking.sem_clockwait, time.CLOCK_MONOTONIC
    _blocking.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return lambda address, clock, moment: _blocking.sem_timedwait(address, moment), time.CLOCK_REALTIME


class _Process:
    """Watch whether a process lives, in a way that no later process of the same number can be taken for it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.begun = pid, _begun(pid)
        self.handle: int | None = None
        try:
            self.handle = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old kernel, or gone already
            self.handle = None

    def lives(self, patience: float = 0.0) -> bool:
        """Tell whether the process lives, also after so many seconds (one that ends has closed its files before)."""
        if self.handle is None:
            time.sleep(patience)
            return self.begun is not None and _begun(self.pid) == self.begun
        watch = select.poll()  # select.select has no room for the files of a process that has many
        watch.register(self.handle, select.POLLIN)
        return not watch.poll(1000 * patience)

    def __del__(self) -> None:
        if self.handle is not None:
            os.close(self.handle)


def _begun(pid: int) -> int | None:
    """Give when a process began, in the kernel's ticks; None where there is none, or one that has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def spins_for(ranks_here: int, threads: int) -> int:
    """Choose how long to spin: hardly at all where the ranks of this host share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SPINS if ranks_here * threads <= cores else 10
