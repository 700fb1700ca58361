"""Probe this machine: what its devices reach, and what ranks take to tell one another something."""

from __future__ import annotations

import gc
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import LayoutError
from .events import Tell, silent
from .hardware.cluster import Cluster, Device, Level, Link
from .hardware.limits import MemoryLimit, device_memory
from .hardware.remembered import host_facts, processor_name, remember, remembered
from .quantities import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from .hardware.probe import Links, Speed
    from .launch.group import OpenGroup

VERSION = "v2"  # of what is measured: a probe of another one is not used
NAMES = {"message": "message, one way", "send": "of it the sender's", "exchange": "exact sum of gradients"}


def probe(devices: int | None = None, *, quick: bool = False, threads: int = 1, tell: Tell = silent) -> Cluster:
    """Measure ``devices`` of this machine (default: all) and give it as a cluster. One process calls it.

    ``quick`` measures only what planning needs, in about two seconds. What is found is kept for later plans.
    """
    from .launch.environment import num_devices
    from .launch.local import run_ranks

    count = devices if devices is not None else num_devices()
    if count < 1:
        raise LayoutError(f"devices={count}; it must be at least 1.")
    tell(f"probing {count} device{'s' if count > 1 else ''} of this machine")
    limit = machine_memory(count)  # before ranks are there, which would count
    found: Cluster = run_ranks(
        lambda context: probe_rank(context.device, quick=quick), count, threads=threads, name="probe"
    )[0]
    found = _with_memory(found, limit)
    key = machine_key(count, threads)
    if not quick or remembered(key) is None:  # a whole probe is worth more than a quick one
        remember(key, found)
    return found


def probed(devices: int, *, threads: int = 1, tell: Tell = silent) -> Cluster:
    """Give this machine as it was probed before, with the memory it has now, or probe it quickly."""
    known = remembered(machine_key(devices, threads))
    if known is None:
        return probe(devices, quick=True, threads=threads, tell=tell)
    return _with_memory(known, machine_memory(devices))


def machine_key(devices: int, threads: int, hosts: int = 1) -> str:
    """Name what a probe depends on: host, processor, usable cores, accelerators, torch, devices, threads, transport."""
    import torch

    from .launch.environment import accelerator_type, num_devices

    kind = accelerator_type()
    accelerators = () if kind == "cpu" else (kind, num_devices(kind), _accelerator_name(kind))
    facts = (VERSION, *host_facts(), *accelerators, torch.__version__, f"{devices} devices", f"{threads} threads")
    return "|".join(map(str, (*facts, f"{hosts} hosts", os.environ.get("MESHWISE_TRANSPORT", ""))))


# ---- inside ranks ------------------------------------------------------------------------------------------


def probe_rank(device: Any, *, quick: bool) -> Cluster:
    """Measure from inside ranks that run. Every rank of the process group calls it; all get the same cluster."""
    from .hardware.probe import measure_speed
    from .launch.group import OpenGroup

    group = OpenGroup()
    hosts = _hosts(group)
    limits = group.tell(machine_memory(max(map(len, hosts))))
    speeds = group.tell(measure_speed(device, quick=quick))
    links, overlap = _measure_links(group, device, hosts, quick)
    _give_back(device)
    limit = min(limits, key=lambda each: each.bytes)
    found: Cluster = group.tell(_cluster(device, speeds, links, hosts, overlap, quick))[0]
    return _with_memory(found, limit)


def _measure_links(
    group: OpenGroup, device: Any, hosts: Sequence[tuple[int, ...]], quick: bool
) -> tuple[Links, float | None]:
    """Measure through a transport of its own."""
    from .hardware.probe import Links, groups_to_measure, measure_links, measure_overlap
    from .parallel.connect import connect

    if group.world_size == 1:
        return Links(), None
    transport = connect(group.rank, groups_to_measure(group.world_size, quick=quick), device)
    return measure_links(transport, hosts, device, quick=quick), measure_overlap(transport, device)


def probed_among_ranks(device: Any) -> Cluster:
    """Give this machine as it was probed before, or probe it now, inside ranks that run. Every rank calls it."""
    import torch

    from .launch.group import OpenGroup

    group = OpenGroup()
    hosts = _hosts(group)
    key = machine_key(group.world_size, torch.get_num_threads(), len(hosts))
    limits = group.tell(machine_memory(max(map(len, hosts))))
    known: Cluster | None = group.tell(remembered(key))[0]  # the first rank's: others may be on other hosts
    if known is not None:
        return _with_memory(known, min(limits, key=lambda each: each.bytes))
    found = probe_rank(device, quick=True)
    if group.rank == 0:
        remember(key, found)
    return found


def _hosts(group: OpenGroup) -> list[tuple[int, ...]]:
    """List the ranks of each host."""
    from .parallel.connect import HOST_VARIABLE

    names = group.tell((os.environ.get(HOST_VARIABLE, ""), socket.gethostname()))
    return [tuple(r for r, name in enumerate(names) if name == host) for host in dict.fromkeys(names)]


def machine_memory(devices: int) -> MemoryLimit:
    """Find what each of so many devices of this host may use."""
    import torch

    if not torch.accelerator.is_available():
        return device_memory(devices)
    free, total = torch.accelerator.get_memory_info()
    return device_memory(devices, accelerator=(int(free), int(total)))


def _give_back(device: Any) -> None:
    """Let go of what the transport shared and the device's allocator keeps, so that it is free for the job."""
    import torch

    gc.collect()  # a transport and what waits for it know one another
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _accelerator_name(kind: str) -> str:
    import torch

    give = getattr(getattr(torch, kind, None), "get_device_name", None)
    return str(give()) if give is not None else kind


# ---- the cluster -------------------------------------------------------------------------------------------


def _cluster(
    device: Any,
    speeds: Sequence[Speed],
    links: Links,
    hosts: Sequence[Sequence[int]],
    overlap: float | None,
    quick: bool,
) -> Cluster:
    """Put together what all ranks measured."""
    import torch

    world = len(speeds)
    when = f"measured here {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {_ranks(world)} at once"
    if overlap is None:
        slow = "1: ranks communicate in the thread that computes, so nothing runs beside it"
        slow = slow if world > 1 else "1: there is one device"
    else:
        slow = f"{when}: products beside the backend's all-reduce"
    own = _device(device, speeds, when)
    return Cluster(
        name=f"{world}x this machine",
        device=own,
        levels=_levels(links, hosts, when) if world > 1 else (Level(size=1, link=_alone(own)),),
        overlap_slowdown=overlap or 1.0,
        measured=links.tables,
        is_here=True,
        sources={"measured": when + (", quick" if quick else ""), "overlap_slowdown": slow},
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _device(device: Any, speeds: Sequence[Speed], when: str) -> Device:
    """Give the device: the median of what all of them reached, in dtypes that all have."""
    import torch

    is_cpu, threads = device.type == "cpu", torch.get_num_threads()
    own = processor_name() if is_cpu else _accelerator_name(device.type)
    dtypes = [d for d in speeds[0].flops if all(d in s.flops for s in speeds)]
    return Device(
        name=f"{threads} core{'s' if threads > 1 else ''} of {own}" if is_cpu else own,
        kind="cpu" if is_cpu else "gpu",
        memory_bytes=0.0,  # set by _with_memory
        peak_flops={d: statistics.median(s.flops[d] for s in speeds) for d in dtypes},
        reachable=statistics.median(s.reachable for s in speeds),
        bytes_per_second=statistics.median(s.bytes_per_second for s in speeds),
        launch_seconds=statistics.median(s.launch_seconds for s in speeds),
        sources={
            "peak_flops": f"{when}: the best of large products of square matrices",
            "reachable": f"{when}: mean of these products",
            "bytes_per_second": f"{when}: adding large tensors in place",
            "launch_seconds": f"{when}: adding to 8 elements",
        },
    )


def _levels(links: Links, hosts: Sequence[Sequence[int]], when: str) -> tuple[Level, ...]:
    """Give the levels: ranks of a host, and hosts; where hosts have unlike numbers of ranks, what is slowest."""
    world, size = sum(map(len, hosts)), len(hosts[0])
    if len(hosts) == 1:
        return (Level(size=world, link=_link("between ranks of a host", links.near, when)),)
    far = _link("between hosts", links.far, when)
    if size == 1 or any(len(host) != size for host in hosts):
        return (Level(size=world, link=far),)
    return (Level(size=size, link=_link("between ranks of a host", links.near, when)), Level(size=len(hosts), link=far))


def _link(name: str, points: Sequence[tuple[float, float]], when: str) -> Link:
    """Give a link by its smallest message and by the rate of its largest."""
    size, seconds = points[-1]
    return Link(name=name, latency_seconds=points[0][1], bytes_per_second=size / seconds, source=when)


def _alone(device: Device) -> Link:
    """Give the link of one device with itself."""
    rate = device.bytes_per_second
    return Link(name="one device", latency_seconds=0.0, bytes_per_second=rate, source="its own memory's bandwidth")


def _with_memory(cluster: Cluster, limit: MemoryLimit) -> Cluster:
    """Give the cluster with the memory that a device may use now."""
    sources = {**cluster.device.sources, "memory_bytes": limit.reason}
    return replace(cluster, device=replace(cluster.device, memory_bytes=limit.bytes, sources=sources))


# ---- to read -----------------------------------------------------------------------------------------------


def describe(cluster: Cluster) -> str:
    """Give what a probe found as a table to read, with its sources."""
    return "\n".join([*_of_device(cluster), *_of_links(cluster), *_of_tables(cluster), *_of_sources(cluster)])


def _of_device(cluster: Cluster) -> Iterator[str]:
    device = cluster.device
    count = f"{device.memory_bytes}" if device.memory_bytes == float("inf") else format_bytes(device.memory_bytes)
    yield f"{cluster.name}: {cluster.num_devices} x {device.name}"
    yield f"  memory a device may use    {count}"
    for dtype, flops in device.peak_flops.items():
        yield f"  matrix products {dtype:<10} {format_count(flops, 'FLOP/s')}"
    yield f"  large products reach       {device.reachable:.0%} of it"
    yield f"  memory bandwidth           {format_count(device.bytes_per_second, 'B/s')}"
    yield f"  smallest operation         {format_seconds(device.launch_seconds)}"
    if cluster.num_devices > 1:
        yield f"  computing beside messages  {cluster.overlap_slowdown:.2f} x as long"


def _of_links(cluster: Cluster) -> Iterator[str]:
    """Give a line for each link."""
    if cluster.num_devices > 1:
        yield ""
        yield f"  {'link':<26} {'joins':>6} {'latency':>10} {'bandwidth':>12}"
    for level in cluster.levels if cluster.num_devices > 1 else ():
        rate = format_count(level.link.bytes_per_second, "B/s")
        latency = format_seconds(level.link.latency_seconds)
        yield f"  {level.link.name:<26} {level.size:>6} {latency:>10} {rate:>12}"


def _of_tables(cluster: Cluster) -> Iterator[str]:
    """Give a row for each table, a column for each size."""
    sizes = sorted({size for table in cluster.measured for size, _ in table.points})
    if sizes:
        yield ""
        yield f"  {'time by bytes':<33}" + "".join(f"{format_bytes(size):>10}" for size in sizes)
    for table in cluster.measured:
        row = dict(table.points)
        cells = (format_seconds(row[size]) if size in row else "-" for size in sizes)
        name = f"{NAMES.get(table.kind, table.kind)}, {_ranks(table.group)}"
        yield f"  {name:<33}" + "".join(f"{cell:>10}" for cell in cells)


def _of_sources(cluster: Cluster) -> Iterator[str]:
    """Give each source once, with all it is the source of."""
    sources: Mapping[str, str] = {
        **cluster.device.sources,
        **{f"link {level.link.name}": level.link.source for level in cluster.levels},
        **cluster.sources,
    }
    yield ""
    for text in dict.fromkeys(sources.values()):
        yield f"  {', '.join(key for key, each in sources.items() if each == text)}: {text}"
