"""Choose how ranks reach one another: through shared memory on one host, else through the process group."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LayoutError
from . import semaphores
from .hosts import HostsTransport, counterparts
from .segment import Segment, SharedMemoryError
from .shared import SharedTransport
from .transport import Group, ProcessGroupTransport, Transport

VARIABLE = "MESHWISE_TRANSPORT"  # auto (default), shared or gloo
DEADLINE_VARIABLE = "MESHWISE_DEADLINE"  # seconds
HOST_VARIABLE = "MESHWISE_HOST"  # parts the ranks of one machine as if they were on several (for tests)
CHOICES = ("auto", "shared", "gloo")
BOOT = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("meshwise")


def connect(rank: int, groups: Sequence[Group], device: torch.device) -> Transport:
    """Make the transport of one rank. Every rank calls it, the default process group being joined.

    CPU ranks of one host use shared memory where they can; the environment variable ``MESHWISE_TRANSPORT`` (the same
    on all ranks) may be ``shared`` to demand it or ``gloo`` to do without. ``MESHWISE_DEADLINE`` is how many seconds
    a rank waits through shared memory for another one that lives but does not answer (default 1800). Raises LayoutError
    where shared memory is demanded and cannot be had, and for a value that neither variable can have.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise LayoutError(f"{VARIABLE}={wanted!r} is not one of {', '.join(CHOICES)}.")
    deadline, why = _deadline(), f"{VARIABLE}=gloo"
    if wanted != "gloo":
        hosts, processes, why = _hosts(device)
        inside = None if why else _share(rank, next(host for host in hosts if rank in host), processes, deadline)
        why = why or _first_problem(inside)
        if isinstance(inside, SharedTransport) and not why:
            return inside if len(hosts) == 1 else _join(inside, groups, hosts, device)
        if wanted == "shared":
            raise LayoutError(f"{VARIABLE}=shared, but ranks cannot share memory: {why}.")
        if device.type == "cpu" and rank == 0:
            log.warning("ranks exchange data through sockets, not shared memory: %s", why)
    transport = ProcessGroupTransport(rank, groups, device)
    transport.note = why
    return transport


def _join(
    inside: SharedTransport, groups: Sequence[Group], hosts: Sequence[Group], device: torch.device
) -> HostsTransport:
    """Add a process group between hosts; also for the ranks that stand in the same place on each."""
    spread = [[tuple(m for m in group if m in host) for host in hosts] for group in groups]
    columns = [column for parts in spread for column in counterparts([p for p in parts if p])]
    between = ProcessGroupTransport(inside.rank, [*groups, *columns], device)
    return HostsTransport(inside, between, hosts)


def _hosts(device: torch.device) -> tuple[list[Group], dict[int, int], str]:
    """Find which ranks are on which host, and their process numbers; or what keeps some rank from sharing memory."""
    facts = _tell_all((_obstacle(device), _host(), os.getpid()))
    problem = next((p for p, _, _ in facts if p), "")
    names = dict.fromkeys(host for _, host, _ in facts)
    hosts = [tuple(r for r, (_, host, _) in enumerate(facts) if host == name) for name in names]
    if not problem and max(map(len, hosts)) == 1:
        problem = "each is on a host of its own"
    return hosts, {r: pid for r, (_, _, pid) in enumerate(facts)}, problem


def _share(rank: int, host: Group, processes: dict[int, int], deadline: float) -> SharedTransport | str:
    """Make the transport through the shared memory of a host, or say why not. Every rank calls it."""
    control: Segment | None = None
    told: Any = None
    try:
        if rank == host[0]:
            control = SharedTransport.make_control(len(host))
            told = control.address
    except OSError as error:
        told = str(error)
    address = _tell_all(told)[host[0]]
    if isinstance(address, str):
        return address
    try:
        control = control or Segment.attach(address)
    except SharedMemoryError as error:
        return str(error)
    spins = semaphores.spins_for(len(host), torch.get_num_threads())
    return SharedTransport(rank, control, {r: processes[r] for r in host}, spins=spins, deadline=deadline)


def _deadline() -> float:
    """Read how long a rank waits for another one, in seconds."""
    text = os.environ.get(DEADLINE_VARIABLE, str(semaphores.DEADLINE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise LayoutError(f"{DEADLINE_VARIABLE}={text!r} is not a number of seconds above 0.")
    return seconds


def _first_problem(found: SharedTransport | str | None) -> str:
    """Agree on what the first rank that has a problem says."""
    return next((p for p in _tell_all(found if isinstance(found, str) else "") if p), "")


def _tell_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _obstacle(device: torch.device) -> str:
    """Say what keeps this rank from sharing memory with any other."""
    if device.type != "cpu":
        return "they have devices of their own"
    if not hasattr(os, "memfd_create") or not semaphores.available():
        return "this platform has no shared memory without a name"
    return ""


def _host() -> str:
    """Name this host, and the space of its process numbers: equal where one rank can map another's memory."""
    pretended = os.environ.get(HOST_VARIABLE, "")
    try:
        return f"{pretended} {BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"
