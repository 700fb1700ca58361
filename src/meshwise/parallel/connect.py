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
from .segment import Segment, SharedMemoryError
from .shared import SharedTransport
from .transport import Group, ProcessGroupTransport, Transport

VARIABLE = "MESHWISE_TRANSPORT"  # auto (default), shared or gloo
CHOICES = ("auto", "shared", "gloo")
BOOT = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("meshwise")


def connect(rank: int, groups: Sequence[Group], device: torch.device) -> Transport:
    """Make the transport of one rank. Every rank calls it, the default process group being joined.

    CPU ranks of one host use shared memory where they can; the environment variable ``MESHWISE_TRANSPORT`` (the same
    on all ranks) may be ``shared`` to demand it or ``gloo`` to do without. Raises LayoutError where it is demanded
    and cannot be had.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise LayoutError(f"{VARIABLE}={wanted!r} is not one of {', '.join(CHOICES)}.")
    why = "" if wanted != "gloo" else f"{VARIABLE}=gloo"
    if not why:
        found = _share(rank, device)
        if isinstance(found, SharedTransport):
            return found
        why = found
        if wanted == "shared":
            raise LayoutError(f"{VARIABLE}=shared, but ranks cannot share memory: {why}.")
        if device.type == "cpu" and rank == 0:
            log.warning("ranks exchange data through sockets, not shared memory: %s", why)
    transport = ProcessGroupTransport(rank, groups, device)
    transport.note = why
    return transport


def _share(rank: int, device: torch.device) -> SharedTransport | str:
    """Make the transport through shared memory, or say why not; the same on every rank."""
    count = dist.get_world_size()
    facts: list[Any] = [None] * count
    dist.all_gather_object(facts, (_obstacle(device), _host(), os.getpid()))
    problem = next((p for p, _, _ in facts if p), "")
    if problem or len({host for _, host, _ in facts}) > 1:
        return problem or "they are on several hosts"
    control, problem = None, ""
    told: list[Any] = [None]
    if rank == 0:
        try:
            control = SharedTransport.make_control(count)
            told = [control.address]
        except OSError as error:
            told = [str(error)]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], str):
        return told[0]
    try:
        control = control or Segment.attach(told[0])
    except SharedMemoryError as error:
        problem = str(error)
    problems: list[Any] = [None] * count
    dist.all_gather_object(problems, problem)
    problem = next((p for p in problems if p), "")
    if problem or control is None:
        return problem
    spins = semaphores.spins_for(count, torch.get_num_threads())
    return SharedTransport(rank, control, [pid for _, _, pid in facts], spins=spins)


def _obstacle(device: torch.device) -> str:
    """Say what keeps this rank from sharing memory with any other."""
    if device.type != "cpu":
        return "they have devices of their own"
    if not hasattr(os, "memfd_create") or not semaphores.available():
        return "this platform has no shared memory without a name"
    return ""


def _host() -> str:
    """Name this host, and the space of its process numbers: equal where one rank can map another's memory."""
    try:
        return f"{BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"
