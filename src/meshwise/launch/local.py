"""Running a function in several ranks on this host, and ending all of them together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

from meshwise.errors import LaunchError
from meshwise.launch import failures, forkserver, rank, settings, ship
from meshwise.launch.environment import accelerator_type, check_enough
from meshwise.launch.failures import Failure
from meshwise.launch.forkserver import warm
from meshwise.launch.rendezvous import Rendezvous, open_rendezvous

# After a failure the others may still report theirs: it may have been the earlier one. A lost connection
# is never the cause, so its cause is given longer to show.
GRACE_SECONDS = 0.5
CAUSE_SECONDS = 3.0
TERMINATE_SECONDS = 1.0
LEAVE_SECONDS = 10.0
Listener = Callable[[Any], None]


@dataclass(kw_only=True)
class _Rank:
    """Follow one rank: its process, its line to here, and what has come over it."""

    number: int
    process: BaseProcess
    connection: Connection
    result: bytes | None = None
    failure: Failure | None = None
    ended: bool = False
    closed: bool = field(default=False)

    @property
    def settled(self) -> bool:
        return self.result is not None or self.failure is not None


def run_ranks(
    function: Callable[[rank.RankContext], Any],
    num_ranks: int,
    *,
    threads: int = 1,
    timeout: float | None = None,
    on_event: Listener | None = None,
    name: str = "job",
    device: str | None = None,
) -> list[Any]:
    """Run ``function(context)`` in ``num_ranks`` new processes and return their results in rank order.

    The function travels with what it closes over and runs with the default process group joined.
    ``threads`` are those of torch in each rank. ``timeout`` is in seconds, from the first start.
    ``on_event(event)`` gets here what a rank gives to ``context.emit``. ``device`` is a device type
    (``cpu``, ``cuda``); without it ranks get accelerators where the host has any.

    The first rank that fails ends the job: a MeshwiseError is raised again as itself, anything else as
    RankError, both naming the rank. Raises LaunchError where something cannot be sent or the time is up.
    However this returns, no process that it started is left.
    """
    if num_ranks < 1 or threads < 1:
        raise LaunchError(f"a job needs at least one rank and one thread, not {num_ranks} and {threads}")
    if forkserver.RANK_VARIABLE in os.environ:
        raise LaunchError(
            f"rank {os.environ[forkserver.RANK_VARIABLE]} was asked to start ranks of its own. A module that the job "
            'comes from trains when it is imported: put that call under if __name__ == "__main__".'
        )
    device_type = device or accelerator_type()
    check_enough(num_ranks, device_type)
    function_bytes = ship.dumps(function)
    deadline = None if timeout is None else time.monotonic() + timeout
    ranks: list[_Rank] = []
    with _payload_file(function_bytes) as payload, contextlib.ExitStack() as stack:
        rendezvous = open_rendezvous()
        stack.callback(_stop, ranks)
        _start_all(ranks, num_ranks, _common(num_ranks, threads, device_type, rendezvous), payload, name)
        _follow(ranks, deadline, timeout or 0.0, on_event or _ignore)
        _dismiss(ranks)
    return [ship.loads(each.result) for each in ranks]


def _ignore(event: Any) -> None:
    """Listen to nothing."""


@contextlib.contextmanager
def _payload_file(data: bytes) -> Iterator[Callable[[], Any]]:
    """Write the payload once; yield what gives a rank its access to it.

    Where a descriptor can be handed over, the file has no name, so that not even a SIGKILL leaves it behind.
    """
    if reduction.HAVE_SEND_HANDLE and sys.platform != "win32":
        with tempfile.TemporaryFile(prefix="meshwise-") as file:
            file.write(data)
            file.flush()
            yield lambda: reduction.DupFd(file.fileno())
        return
    descriptor, path = tempfile.mkstemp(prefix="meshwise-")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        yield lambda: path
    finally:
        os.unlink(path)


def _common(num_ranks: int, threads: int, device_type: str, rendezvous: Rendezvous) -> dict[str, Any]:
    """Collect what every rank is told alike."""
    return {
        "num_ranks": num_ranks,
        "threads": threads,
        "device_type": device_type,
        "rendezvous": rendezvous,
        "variables": _variables(),
        "directory": os.getcwd(),
        "search_path": list(sys.path),
        "torch_settings": settings.current(),
        "start_method": forkserver.workers_start_method(),
        "own_group": forkserver.has_process_groups(),
    }


def _variables() -> dict[str, str]:
    """Copy the environment; ranks of one host talk over loopback, whatever its name resolves to."""
    variables = dict(os.environ)
    loopback = _loopback_device()
    if loopback:
        variables.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return variables


def _loopback_device() -> str | None:
    devices = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in ("lo", "lo0") if name in devices), None)


def _start_all(
    ranks: list[_Rank], num_ranks: int, common: dict[str, Any], payload: Callable[[], Any], name: str
) -> None:
    """Start the processes; ``ranks`` grows as they come to life, so that what was started can be ended."""
    warm()
    context = forkserver.start_context()
    for number in range(num_ranks):
        here, there = Pipe()
        start = _Deferred(common, number, there, payload)
        process = context.Process(target=rank.main, args=(start,), name=f"{name}-rank{number}")  # type: ignore[attr-defined]
        with forkserver.main_hidden():
            process.start()
        there.close()
        ranks.append(_Rank(number=number, process=process, connection=here))


class _Deferred:
    """Become a ``rank.Start`` while multiprocessing pickles it: descriptors can only be sent just then."""

    def __init__(
        self, common: dict[str, Any], number: int, line: Connection, payload: Callable[[], Any]
    ) -> None:
        self._parts = (common, number, line, payload)

    def __reduce__(self) -> tuple[Any, ...]:
        common, number, line, payload = self._parts
        own = {"rank": number, "connection": line, "payload": payload(), "streams": _streams()}
        return _make_start, (common | own,)


def _make_start(fields: dict[str, Any]) -> rank.Start:
    return rank.Start(**fields)


def _streams() -> tuple[Any, ...]:
    """Hand over where this process writes now, where the platform can."""
    if not reduction.HAVE_SEND_HANDLE or sys.platform == "win32":
        return ()
    try:
        for stream in (1, 2):
            os.fstat(stream)
    except OSError:  # a service without streams
        return ()
    return reduction.DupFd(1), reduction.DupFd(2)


def _follow(ranks: Sequence[_Rank], deadline: float | None, timeout: float, on_event: Listener) -> None:
    """Listen to the ranks until each has a result; raise the first failure once it is sure to be that."""
    while not all(each.result is not None for each in ranks):
        give_up = _verdict_time(ranks)
        if give_up is not None and time.monotonic() >= give_up:
            _raise_first(ranks)
        if deadline is not None and give_up is None and time.monotonic() >= deadline:
            unfinished = [each.number for each in ranks if each.result is None]
            failures.raise_timeout(unfinished, timeout, len(ranks))
        _listen(ranks, _earliest(give_up, deadline), on_event)


def _verdict_time(ranks: Sequence[_Rank]) -> float | None:
    """Return when the failures known by now may be judged, on the monotonic clock; None without any."""
    known = [each.failure for each in ranks if each.failure is not None]
    if not known:
        return None
    if all(each.settled for each in ranks):
        return 0.0
    causes = [failure.seconds for failure in known if not failure.secondary]
    if causes:
        return min(causes) + GRACE_SECONDS
    return min(failure.seconds for failure in known) + CAUSE_SECONDS


def _raise_first(ranks: Sequence[_Rank]) -> None:
    first = failures.first(each.failure for each in ranks if each.failure is not None)
    failures.raise_failure(first, [each.number for each in ranks if each.result is not None])


def _earliest(*times: float | None) -> float | None:
    return min((each for each in times if each is not None), default=None)


def _listen(ranks: Sequence[_Rank], until: float | None, on_event: Listener) -> None:
    """Wait for the next thing to happen and take it in."""
    sources: dict[Any, _Rank] = {each.connection: each for each in ranks if not each.closed}
    sources |= {each.process.sentinel: each for each in ranks if not each.ended}
    seconds = None if until is None else max(0.0, until - time.monotonic())
    for source in wait(list(sources), seconds):
        each = sources[source]
        if source is each.connection:
            _receive(each, on_event)
        else:
            _bury(each, on_event)


def _receive(each: _Rank, on_event: Listener) -> None:
    """Take one message of a rank."""
    try:
        kind, _, data = each.connection.recv_bytes().partition(b":")
    except (EOFError, OSError):
        each.closed = True
        return
    if kind == b"event":
        on_event(ship.loads(data))
    elif kind == b"result":
        each.result = data
    else:
        each.failure = ship.loads(data)


def _bury(each: _Rank, on_event: Listener) -> None:
    """Note that a rank's process is gone: read what it still said, and take its silence for a failure."""
    seconds = time.monotonic()
    each.process.join()
    each.ended = True
    while not each.closed and each.connection.poll():
        _receive(each, on_event)
    if not each.settled:
        each.failure = failures.death(each.number, each.process.exitcode, seconds)


def _dismiss(ranks: Sequence[_Rank]) -> None:
    """Let ranks go that wait until all are done."""
    for each in ranks:
        each.connection.close()
    _wait_for_end(ranks, LEAVE_SECONDS)


def _stop(ranks: Sequence[_Rank]) -> None:
    """End every rank with all of its descendants, also those that outlived a rank which left by itself."""
    try:
        if any(each.process.is_alive() for each in ranks):
            _signal_all(ranks, "SIGTERM")
            _wait_for_end(ranks, TERMINATE_SECONDS)
    finally:  # also when a second Ctrl-C comes during the wait
        _signal_all(ranks, "SIGKILL")
        for each in ranks:
            each.process.join()
            each.process.close()
            each.connection.close()


def _wait_for_end(ranks: Sequence[_Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for each in ranks:
        each.process.join(max(0.0, deadline - time.monotonic()))


def _signal_all(ranks: Sequence[_Rank], name: str) -> None:
    for each in ranks:
        if forkserver.has_process_groups():
            _signal_group(each.process, getattr(signal, name))
        elif name == "SIGTERM":
            each.process.terminate()
        else:
            each.process.kill()


def _signal_group(process: BaseProcess, number: int) -> None:
    """Signal a rank's group, which may outlive the rank; a rank too young to have one gets it alone."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
