"""Measure the devices of this machine and what ranks tell one another; every function is called by every rank.

What computes is measured while all ranks compute, since that is how they will. Times are medians; the first is thrown
away. A device that works on its own (CUDA) is waited for before a clock is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.transport import Transport, wait_for
from .cluster import Measured

KIB, MIB = 1 << 10, 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK_SIZES = (KIB, 64 * KIB, MIB, 8 * MIB)
FULL_SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
TOO_LONG = 0.5  # seconds of one operation; larger sizes are left out then


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Hold what one device reached: FLOP/s by dtype, bytes a second of memory, seconds of the smallest operation."""

    flops: dict[str, float]
    bytes_per_second: float
    launch_seconds: float


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(run: Callable[[], Any], device: torch.device, *, seconds: float) -> float:
    """Give the median seconds of a call over rounds that take about ``seconds``."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 4 or (time.perf_counter() - begun < seconds and len(times) < 200):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# ---- computing ---------------------------------------------------------------------------------------------


def measure_speed(device: torch.device, *, quick: bool) -> Speed:
    """Measure products of matrices, memory and the smallest operation on this rank's device."""
    each = 0.15 if quick else 0.6
    dtypes = ("fp32",) if quick else tuple(DTYPES)
    side = 512 if device.type == "cpu" else 4096
    flops = {}
    for name in dtypes:
        rate = _product(device, DTYPES[name], side, each)
        if rate:
            flops[name] = rate
    return Speed(
        flops=flops,
        bytes_per_second=_memory(device, each),
        launch_seconds=_smallest(device, each / 3),
    )


def _product(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    """Give the FLOP/s of products of square matrices; 0 where the device has none of that dtype."""
    try:
        a = torch.ones(side, side, device=device, dtype=dtype)
        out = torch.empty_like(a)
        took = timed(lambda: torch.mm(a, a, out=out), device, seconds=seconds)
    except (RuntimeError, TypeError):
        return 0.0
    return 2 * side**3 / took


def _memory(device: torch.device, seconds: float) -> float:
    """Give the bytes read and written a second by adding large tensors (larger than any cache)."""
    count = (48 if device.type == "cpu" else 512) * MIB // 4
    a, b = torch.zeros(count, device=device), torch.zeros(count, device=device)
    return 3 * 4 * count / timed(lambda: a.add_(b), device, seconds=seconds)


def _smallest(device: torch.device, seconds: float) -> float:
    a = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(100):
            a.add_(1.0)

    return timed(many, device, seconds=seconds) / 100


# ---- what ranks tell one another ---------------------------------------------------------------------------


def drive(steps: Iterator[None]) -> None:
    """Run a generator of the transport to its end."""
    for _ in steps:
        pass


def measure_links(transport: Transport, world: int, device: torch.device, *, quick: bool) -> list[Measured]:
    """Measure messages between neighbours and exchanges of gradients in groups of 2, 4, .. and all ranks."""
    if world == 1:
        return []
    sizes = QUICK_SIZES if quick else FULL_SIZES
    each = 0.02 if quick else 0.1
    message, send = _messages(transport, device, sizes, each)
    found = [Measured(kind="message", group=2, points=message), Measured(kind="send", group=2, points=send)]
    groups = sorted({world, *(g for g in (2, 4, 8) if g < world)}) if not quick else [world]
    for count in groups:
        points = _exchanges(transport, tuple(range(count)), device, sizes, each)
        found.append(Measured(kind="exchange", group=count, points=points))
    if not quick:
        found += list(_collectives(world, device, sizes, each))
    return found


Points = tuple[tuple[float, float], ...]


def _messages(
    transport: Transport, device: torch.device, sizes: Sequence[int], seconds: float
) -> tuple[Points, Points]:
    """Let ranks 0 and 1 send a value to and fro; give the seconds of one way, and those of the sender alone."""
    one_way: list[tuple[float, float]] = []
    sending: list[tuple[float, float]] = []
    for number, size in enumerate(sizes):
        value = torch.ones(size, dtype=torch.uint8, device=device)
        ways, sends = _to_and_fro(transport, value, device, seconds, tag=10_000 * (number + 1))
        one_way.append((float(size), _agree(ways)))
        sending.append((float(size), _agree(sends)))
        if one_way[-1][1] > TOO_LONG:
            break
    return tuple(one_way), tuple(sending)


def _to_and_fro(
    transport: Transport, value: Tensor, device: torch.device, seconds: float, tag: int
) -> tuple[float, float]:
    """Give the median of one way and of the call that sends; ranks beyond the first two only wait."""
    rank, ways, sends = transport.rank, [0.0], [0.0]
    dist.barrier()
    if rank < 2:
        rounds = _rounds(value.numel(), seconds)
        for k in range(rounds):
            begun = time.perf_counter()
            if rank == 0:
                transport.send(value, 1, tag + k)
                sent = time.perf_counter()
                drive(wait_for(transport.receive(value.numel(), 1, tag + k)))
            else:
                drive(wait_for(transport.receive(value.numel(), 0, tag + k)))
                sent = begun = time.perf_counter()
                transport.send(value, 0, tag + k)
                sent = time.perf_counter()
            synchronize(device)
            ways.append((time.perf_counter() - begun) / 2)
            sends.append(sent - begun)
        transport.flush()
    dist.barrier()
    return (statistics.median(ways[2:]) if rank == 0 else 0.0), (statistics.median(sends[2:]) if rank == 0 else 0.0)


def _rounds(num_bytes: int, seconds: float) -> int:
    """Give the rounds for a size: the same on both sides, so by the bytes alone (as if 2 GB/s went through)."""
    return max(6, min(200, int(seconds / (3e-5 + num_bytes / 2e9))))


def _agree(value: float) -> float:
    """Give every rank the largest of all ranks' values (0: has none)."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return float(max(told))


def _exchanges(
    transport: Transport, group: tuple[int, ...], device: torch.device, sizes: Sequence[int], seconds: float
) -> Points:
    """Measure the exact sum of a row of gradients over the replicas of a group, as a step does it."""
    points: list[tuple[float, float]] = []
    largest = max(sizes)
    member = transport.rank in group
    segment = _drive_value(transport.share(largest * len(group), group)) if member and device.type == "cpu" else None
    for size in sizes:
        took = 0.0
        if member:
            run = _fold(transport, group, segment, size) if segment is not None else _by_messages(group, size, device)
            for _ in range(2):
                run()
            times = []
            for _ in range(max(4, min(50, int(seconds / (5e-5 + size * 2e-10))))):
                start = time.perf_counter()
                run()
                synchronize(device)
                times.append(time.perf_counter() - start)
            took = statistics.median(times)
        points.append((float(size), _agree(took)))
        if points[-1][1] > TOO_LONG:
            break
    return tuple(points)


def _drive_value(pending: Any) -> Any:
    steps = wait_for(pending)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def _fold(transport: Transport, group: tuple[int, ...], segment: Any, size: int) -> Callable[[], None]:
    """Let each member add up its share of all members' rows in shared memory, between two meetings."""
    me, count = group.index(transport.rank), len(group)
    rows = segment.bytes.view(torch.float32).view(count, -1)
    length = max(1, size // 4 // count)
    mine = rows[:, me * length : (me + 1) * length]

    def run() -> None:
        drive(wait_for(transport.meet(group)))
        torch.sum(mine, dim=0)
        drive(wait_for(transport.meet(group)))

    return run


def _by_messages(group: tuple[int, ...], size: int, device: torch.device) -> Callable[[], None]:
    """Let members exchange shares and then gather the sums, through the backend."""
    flat = torch.zeros(size // 4 // len(group) * len(group), device=device)
    got = torch.empty_like(flat)
    whole = dist.GroupMember.WORLD if len(group) == dist.get_world_size() else None

    def run() -> None:
        if whole is None:
            return
        dist.all_to_all_single(got, flat)
        dist.all_gather(list(flat.chunk(len(group))), got[: flat.numel() // len(group)])

    return run


def _collectives(world: int, device: torch.device, sizes: Sequence[int], seconds: float) -> Iterator[Measured]:
    """Measure what the backend itself offers, over all ranks."""
    for kind in ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"):
        points = []
        for size in sizes:
            try:
                run = _collective(kind, size // 4 // world * world, world, device)
                for _ in range(2):
                    run()
                rounds = max(4, min(50, int(seconds / (2e-4 + size * 1e-9))))
                times = []
                for _ in range(rounds):
                    start = time.perf_counter()
                    run()
                    synchronize(device)
                    times.append(time.perf_counter() - start)
            except (RuntimeError, NotImplementedError):  # not every backend has all of them
                break
            points.append((float(size), _agree(statistics.median(times))))
            if points[-1][1] > TOO_LONG:
                break
        if points:
            yield Measured(kind=kind, group=world, points=tuple(points))


def _collective(kind: str, count: int, world: int, device: torch.device) -> Callable[[], Any]:
    flat = torch.zeros(max(count, world), device=device)
    part = torch.zeros(flat.numel() // world, device=device)
    other = torch.empty_like(flat)
    return {
        "all-reduce": lambda: dist.all_reduce(flat),
        "reduce-scatter": lambda: dist.reduce_scatter(part, list(flat.chunk(world))),
        "all-gather": lambda: dist.all_gather(list(flat.chunk(world)), part),
        "broadcast": lambda: dist.broadcast(flat, 0),
        "all-to-all": lambda: dist.all_to_all_single(other, flat),
    }[kind]
