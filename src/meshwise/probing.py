"""Probe this machine: what its devices reach, and what ranks take to tell one another something."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .errors import LayoutError
from .hardware.cluster import Cluster, Device, Level, Link, Measured
from .hardware.limits import device_memory
from .hardware.remembered import remember, remembered
from .quantities import format_bytes, format_count, format_seconds

Tell = Callable[[str], None]


def _quiet(text: str) -> None:
    """Tell nobody."""


def probe(devices: int | None = None, *, quick: bool = False, threads: int = 1, tell: Tell = _quiet) -> Cluster:
    """Measure ``devices`` of this machine (default: all) and give it as a cluster. One process calls it.

    ``quick`` measures only what planning needs, in about two seconds. What is found is kept for later plans.
    """
    from .launch.environment import num_devices
    from .launch.local import run_ranks

    count = devices if devices is not None else num_devices()
    if count < 1:
        raise LayoutError(f"devices={count}; it must be at least 1.")
    tell(f"probing {count} device{'s' if count > 1 else ''} of this machine")
    found: Cluster = run_ranks(
        lambda context: probe_rank(context.device, quick=quick), count, threads=threads, name="probe"
    )[0]
    remember(machine_key(count, threads), found)
    return found


def probed(devices: int, *, threads: int = 1, tell: Tell = _quiet) -> Cluster:
    """Give this machine as it was probed before, or probe it quickly now."""
    known = remembered(machine_key(devices, threads))
    if known is None:
        return probe(devices, quick=True, threads=threads, tell=tell)
    return replace(known, device=replace(known.device, memory_bytes=_memory_bytes(devices)))


def machine_key(devices: int, threads: int) -> str:
    """Name what a probe depends on: host, processor, usable cores, accelerators, torch, devices and threads."""
    import torch

    from .launch.environment import accelerator_type, num_devices

    facts = (socket.gethostname(), processor_name(), num_devices("cpu"), accelerator_type(), torch.__version__)
    return "|".join(map(str, (*facts, devices, threads, os.environ.get("MESHWISE_TRANSPORT", ""), "v1")))


def probe_rank(device: Any, *, quick: bool) -> Cluster:
    """Measure from inside ranks that run. Every rank of the process group calls it; all get the same cluster."""
    import torch.distributed as dist

    from .hardware.probe import measure_links, measure_speed
    from .parallel.connect import connect

    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    if world > 1:
        dist.barrier()
    speed = measure_speed(device, quick=quick)
    speeds: list[Any] = [speed]
    links: list[Measured] = []
    if world > 1:
        groups = [tuple(range(count)) for count in sorted({world, *(g for g in (2, 4, 8) if g < world)})]
        transport = connect(rank, groups, device)
        links = measure_links(transport, world, device, quick=quick)
        speeds = [None] * world
        dist.all_gather_object(speeds, speed)
    found = _cluster(device, speeds, links, world, quick)
    if world > 1:
        told: list[Any] = [found]
        dist.broadcast_object_list(told, src=0)
        found = told[0]
    return found


def probed_among_ranks(device: Any) -> Cluster:
    """Give this machine as it was probed before, or probe it now, inside ranks that run. Every rank calls it."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    key = machine_key(world, torch.get_num_threads())
    told: list[Any] = [remembered(key)]
    if world > 1:
        dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        known: Cluster = told[0]
        return known
    found = probe_rank(device, quick=True)
    if world == 1 or dist.get_rank() == 0:
        remember(key, found)
    return found


def _cluster(device: Any, speeds: list[Any], links: list[Measured], world: int, quick: bool) -> Cluster:
    """Put what all ranks measured together: the median of their speeds."""
    import torch

    when = f"measured here {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {world} ranks at once"
    flops = {d: statistics.median(s.flops[d] for s in speeds) for d in speeds[0].flops}
    bandwidth = statistics.median(s.bytes_per_second for s in speeds)
    message = next((m for m in links if m.kind == "message"), None)
    latency = message.points[0][1] if message else 0.0
    rate = message.points[-1][0] / message.points[-1][1] if message else bandwidth
    kind = "cpu" if device.type == "cpu" else "gpu"
    name = processor_name() if kind == "cpu" else torch.cuda.get_device_name() if device.type == "cuda" else device.type
    own = Device(
        name=f"1 core of {name}" if kind == "cpu" else name,
        kind=kind,
        memory_bytes=_memory_bytes(world),
        peak_flops=flops,
        reachable=1.0,
        bytes_per_second=bandwidth,
        launch_seconds=statistics.median(s.launch_seconds for s in speeds),
        sources=dict.fromkeys(("peak_flops", "bytes_per_second", "launch_seconds"), when),
    )
    link = Link(name="between ranks of this host", latency_seconds=latency, bytes_per_second=rate, source=when)
    return Cluster(
        name=f"{world}x this machine",
        device=own,
        levels=(Level(size=world, link=link),),
        measured=tuple(links),
        is_here=True,
        sources={
            "measured": when + (", quick" if quick else ""),
            "overlap_slowdown": "1: ranks of a CPU communicate in the thread that computes, so nothing overlaps",
        },
    )


def _memory_bytes(devices: int) -> float:
    import torch

    if torch.accelerator.is_available():
        return float(torch.accelerator.get_memory_info()[0])
    return device_memory(devices).bytes


def processor_name() -> str:
    """Give the processor's name as the system states it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return lines[0] if lines else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def describe(cluster: Cluster) -> str:
    """Give what a probe found as a table to read, with its sources."""
    device = cluster.device
    lines = [
        f"{cluster.name}: {cluster.num_devices} x {device.name}",
        f"  memory a device may use    {format_bytes(device.memory_bytes)}",
        *(f"  matrix products {d:<10} {format_count(f, 'FLOP/s')}" for d, f in device.peak_flops.items()),
        f"  memory bandwidth           {format_count(device.bytes_per_second, 'B/s')}",
        f"  smallest operation         {format_seconds(device.launch_seconds)}",
    ]
    kinds = {(m.kind, m.group): m for m in cluster.measured}
    if kinds:
        sizes = sorted({int(b) for m in kinds.values() for b, _ in m.points})
        lines += ["", "  " + f"{'seconds by bytes':<36}" + "".join(f"{format_bytes(b):>10}" for b in sizes)]
        for (kind, group), table in kinds.items():
            row = {int(b): s for b, s in table.points}
            cells = "".join(f"{format_seconds(row[b]) if b in row else '-':>10}" for b in sizes)
            lines.append("  " + f"{NAMES.get(kind, kind) + f', {group} ranks':<36}" + cells)
    lines += ["", *(f"  source: {text}" for text in dict.fromkeys(cluster.sources.values()))]
    return "\n".join(lines)


NAMES = {"message": "message, one way", "send": "of it the sender's", "exchange": "exact sum of gradients"}
