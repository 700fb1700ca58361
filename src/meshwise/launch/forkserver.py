"""How a rank's process begins: from a forkserver that holds torch already, or by spawning one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, get_context
from multiprocessing.context import BaseContext

# All that a rank needs up to its first step. A name that does not exist would be passed over without a word.
PRELOAD = (
    "torch",
    "numpy.random",
    "meshwise.launch.rank",
    "meshwise.session",
    "meshwise.training",
    "meshwise.verification",
)
RANK_VARIABLE = "MESHWISE_RANK"  # set in a rank and in what it starts: ranks must not start ranks
STARTED_BY = (RANK_VARIABLE, "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # what says that a process has company already
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_starting = threading.RLock()


def has_process_groups() -> bool:
    """Say whether this platform can end a process with all of its descendants by one signal."""
    return sys.platform != "win32" and hasattr(os, "killpg")


def start_context() -> BaseContext:
    """Choose how ranks begin: a forkserver on Linux; elsewhere forking a process with torch is not safe."""
    return get_context("forkserver" if sys.platform.startswith("linux") else "spawn")


def workers_start_method() -> str:
    """Choose how a rank starts processes of its own, such as loader workers.

    By fork where ranks come from a forkserver, unless the user chose otherwise: only a fork takes a dataset
    along whose class was defined in the user's script, which no rank imports.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or ("fork" if start_context().get_start_method() == "forkserver" else "spawn")


def warm() -> None:
    """Start the forkserver early and return at once; a later ``run_ranks`` waits for what is left of it.

    Does nothing where ranks are spawned. Calling it again costs nothing.
    """
    if start_context().get_start_method() != "forkserver":
        return
    with main_hidden(), _interrupts_blocked(), _single_threaded_libraries():
        forkserver.set_forkserver_preload(list(PRELOAD))
        forkserver.ensure_running()


def warm_ahead(num_devices: int | None) -> None:
    """Start the forkserver for a job on that many devices (None: all of this machine), if it will start ranks.

    A job on one device starts none, nor does one in a rank or under torchrun or Slurm. Imports no torch.
    """
    here = num_cores() if num_devices is None else num_devices
    if here > 1 and not any(name in os.environ for name in STARTED_BY):
        warm()


def num_cores() -> int:
    """Count the cores that this process may use, which may be fewer than the host has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Hide what multiprocessing would run again in each rank: the user's script."""
    with _starting:
        main = sys.modules["__main__"].__dict__
        hidden: dict[str, object] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
        main["__spec__"] = None
        main.pop("__file__", None)
        try:
            yield
        finally:
            main.pop("__spec__")
            main.update(hidden)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Keep Ctrl-C from the forkserver while it imports: it inherits the mask; the parent decides."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _single_threaded_libraries() -> Iterator[None]:
    """Start no numpy threads in the forkserver: they would not survive the fork, only fill the cores."""
    before = os.environ.get(_NUMPY_THREADS)
    os.environ.setdefault(_NUMPY_THREADS, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NUMPY_THREADS]
