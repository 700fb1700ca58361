"""What runs in a rank's process: set it up like the parent, join the others, call the function, report."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from meshwise.errors import LaunchError
from meshwise.launch import settings, ship
from meshwise.launch.environment import Environment, device_for, init_process_group
from meshwise.launch.failures import describe
from meshwise.launch.forkserver import RANK_VARIABLE
from meshwise.launch.light import leave_compiler_out
from meshwise.launch.memory import keep_freed_memory
from meshwise.launch.rendezvous import Rendezvous, connect

LINGER_SECONDS = 2.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Hold what a rank knows about itself; the default process group is up when a function gets it."""

    environment: Environment
    device: torch.device
    threads: int
    store: Store | None = field(default=None, repr=False)
    emit: Callable[[Any], None] = field(repr=False)

    @property
    def rank(self) -> int:
        """Return this rank's number, from 0."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.environment.world_size

    @property
    def local_rank(self) -> int:
        """Return this rank's number on its host, from 0."""
        return self.environment.local_rank


@dataclass(frozen=True, kw_only=True)
class Start:
    """Hold all that a rank's process is told, in values that any process can rebuild."""

    rank: int
    num_ranks: int
    threads: int
    device_type: str
    payload: Any  # a file descriptor on its way, or a path
    connection: Connection
    rendezvous: Rendezvous
    variables: dict[str, str]
    directory: str
    search_path: list[str]
    torch_settings: dict[str, Any]
    streams: tuple[Any, ...]
    start_method: str
    own_group: bool


def main(start: Start) -> None:
    """Run one rank from its first line to its report. The parent started this process for it."""
    _guard(start.own_group)
    reporter = _Reporter(start.rank, start.connection)
    try:
        _resemble_parent(start)
        keep_freed_memory()
        context = _join(start, reporter)
        function = _load(start)
        leave_compiler_out()
        result = ship.dumps(function(context), what="the result")
    except BaseException as error:  # noqa: BLE001 - also SystemExit: the parent must hear of it
        reporter.failed(error)
        _flush()
        os._exit(1)
    reporter.finished(result)
    _leave()


def join_environment(environment: Environment, *, threads: int, emit: Callable[[Any], None]) -> RankContext:
    """Become a rank of the job that torchrun or Slurm started. Every such process must call it once.

    Raises LaunchError where the ranks cannot meet, or this host has no accelerator for this one.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    device = device_for(environment.local_rank)
    init_process_group(environment, device=device)
    return RankContext(environment=environment, device=device, threads=threads, emit=emit)


def _guard(own_group: bool) -> None:
    """Lead a process group of its own, leave Ctrl-C to the parent, and end when the parent is gone."""
    if own_group:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_watch_parent, args=(own_group,), name="parent watch", daemon=True).start()


def _watch_parent(own_group: bool) -> None:
    """Wait for the parent's end, whatever ended it, and take this rank's own children along."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if own_group:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _resemble_parent(start: Start) -> None:
    """Take over what a function may rely on: streams, variables, directory, search path, torch's settings."""
    for target, stream in enumerate(start.streams, start=1):
        _redirect(stream.detach(), target)
    os.environ.clear()
    os.environ.update(start.variables)
    for name in THREAD_VARIABLES:
        os.environ[name] = str(start.threads)
    os.environ[RANK_VARIABLE] = str(start.rank)
    torch.set_num_threads(start.threads)
    with contextlib.suppress(OSError):  # the directory may have been deleted since
        os.chdir(start.directory)
    sys.path[:] = start.search_path
    multiprocessing.set_start_method(start.start_method, force=True)
    settings.apply(start.torch_settings)


def _redirect(source: int, target: int) -> None:
    """Write where the parent writes now: the forkserver may have been started under another stdout."""
    os.dup2(source, target)
    os.close(source)
    stream = sys.stdout if target == 1 else sys.stderr
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(line_buffering=True)


def _join(start: Start, reporter: _Reporter) -> RankContext:
    """Meet the other ranks; from here on collectives work."""
    environment = Environment(
        rank=start.rank,
        world_size=start.num_ranks,
        local_rank=start.rank,
        local_world_size=start.num_ranks,
        master_addr="127.0.0.1",
        master_port=start.rendezvous.port,
    )
    device, store = device_for(start.rank, start.device_type), connect(start.rendezvous)
    init_process_group(environment, device=device, store=PrefixStore("default", store))
    return RankContext(
        environment=environment,
        device=device,
        threads=start.threads,
        store=PrefixStore("user", store),
        emit=reporter.emit,
    )


def _load(start: Start) -> Callable[[RankContext], Any]:
    with _payload(start.payload) as data:
        try:
            return ship.loads(data)  # type: ignore[no-any-return]
        except Exception as error:
            raise LaunchError(
                f"what was sent to the ranks could not be rebuilt there ({type(error).__name__}: {error}); "
                "a class that pickles itself must also be able to load itself in a fresh process"
            ) from error


@contextlib.contextmanager
def _payload(source: Any) -> Iterator[mmap.mmap]:
    """Map the file that the parent wrote once for all ranks."""
    descriptor = os.open(source, os.O_RDONLY) if isinstance(source, str) else source.detach()
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            yield data
    finally:
        os.close(descriptor)


class _Reporter:
    """Send what happens in this rank to the parent, one message at a time from whichever thread."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self._rank = rank
        self._connection = connection
        self._sending = threading.Lock()
        if hasattr(os, "register_at_fork"):  # a loader worker must not hold the line open
            os.register_at_fork(after_in_child=connection.close)

    def emit(self, event: Any) -> None:
        """Hand an event to the parent's listener."""
        self._send("event", ship.dumps(event, what="the event"))

    def failed(self, error: BaseException) -> None:
        """Report what ended this rank; a parent that is gone already needs no report."""
        seconds = time.monotonic()
        with contextlib.suppress(OSError):
            self._send("failure", ship.dumps(describe(self._rank, error, seconds, _pickled(error))))

    def finished(self, result: bytes) -> None:
        """Hand over the result and stay until all ranks are done: a neighbour may still read from us."""
        with contextlib.suppress(OSError, EOFError):
            self._send("result", result)
            self._connection.poll(LINGER_SECONDS)

    def _send(self, kind: str, data: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(kind.encode() + b":" + data)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception if it can also be rebuilt: many with arguments of their own cannot."""
    try:
        data = ship.dumps(error)
        ship.loads(data)
    except Exception:  # noqa: BLE001 - whatever its own reducer raises
        return None
    return data


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _leave() -> None:
    """Close the group's connections while Python is still whole."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()
