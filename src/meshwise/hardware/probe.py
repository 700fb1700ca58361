"""Measure the devices of this machine and what ranks tell one another; every function is called by every rank.

What computes is measured while all ranks compute, since that is how they will. Times are medians, the first rounds
thrown away. A device that works on its own (CUDA) is waited for before a clock is read. Noise only ever adds time: what
took a large message bounds what takes a smaller one.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.reduce import Reducer, make_buckets
from ..parallel.rows import RowLayout
from ..parallel.shared_reduce import Reach, SharedReducer
from ..parallel.transport import Group, ProcessGroupTransport, Transport, wait_for
from .cluster import Measured

KIB, MIB = 1 << 10, 1 << 20
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIDES = {"cpu": (512, 1024), "other": (4096, 8192)}  # of square matrices: large for the device, a few ms at most
STREAM_BYTES = {"cpu": 48 * MIB, "other": 512 * MIB}  # of each tensor of two: larger than a device's share of a cache
QUICK_SIZES: tuple[int, ...] = (KIB, 64 * KIB, MIB, 8 * MIB)
FULL_SIZES: tuple[int, ...] = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LARGEST_SITE = 4 * MIB  # bytes of one parameter's gradient in an exchange by messages: a layer of 1024 x 1024 in fp32
ROUND_SECONDS = 2e-3  # of computing between two looks at the clock: 100 times what waiting for a GPU takes
COMPUTE_SECONDS = {True: 0.15, False: 0.4}  # quick or not: for each figure of a device
LINK_SECONDS = {True: 0.03, False: 0.1}  # and for each operation and size
LONG = 0.02  # seconds; what takes longer is measured in one turn: a moment's noise is a small part of it
TOO_LONG = 0.5  # seconds; a size that would take longer (four times the one before) is left out
TURNS = 3  # in which all sizes are measured: what disturbs one may be gone in the next
ROUNDS = (3, 200)  # of one size in one turn, fewest and most
OVERLAP_BYTES = 16 * MIB
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all")

Points = tuple[tuple[float, float], ...]
Round = Callable[[], tuple[float, ...]]  # one round of an operation: its seconds, and maybe those of a part of it


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Hold what one device reached.

    FLOP/s by dtype of its best large products and the mean share of them that large products reach, bytes a second of
    memory, seconds of the smallest operation.
    """

    flops: dict[str, float]
    reachable: float
    bytes_per_second: float
    launch_seconds: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """Hold what ranks take to tell one another something: tables; seconds by bytes inside a host and between hosts."""

    tables: tuple[Measured, ...] = ()
    near: Points = ()
    far: Points = ()


# ---- computing ---------------------------------------------------------------------------------------------


def measure_speed(device: torch.device, *, quick: bool) -> Speed:
    """Measure products of matrices, memory and the smallest operation on this rank's device."""
    each = COMPUTE_SECONDS[quick]
    kind = "cpu" if device.type == "cpu" else "other"
    sides = SIDES[kind][: 1 if quick else None]
    names = [n for n in DTYPES if not (quick and n != "fp32") and not (n == "tf32" and device.type != "cuda")]
    rates = {name: [_product(device, name, side, each) for side in sides] for name in names}
    peaks = {name: max(found) for name, found in rates.items()}
    shares = [rate / peaks[name] for name, found in rates.items() for rate in found if rate]
    return Speed(
        flops={name: peak for name, peak in peaks.items() if peak},
        reachable=statistics.mean(shares),
        bytes_per_second=_memory(device, STREAM_BYTES[kind], each),
        launch_seconds=_smallest(device, each / 3),
    )


def together() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(run: Callable[[], Any], device: torch.device, *, seconds: float) -> float:
    """Give the median seconds of a call, repeated for about ``seconds`` in rounds that a clock can tell apart."""
    _round(run, device, 1)
    calls = max(1, min(1000, math.ceil(ROUND_SECONDS / _round(run, device, 1))))
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begun < seconds:
        times.append(_round(run, device, calls) / calls)
    return statistics.median(times)


def _round(run: Callable[[], Any], device: torch.device, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return time.perf_counter() - start


def _product(device: torch.device, name: str, side: int, seconds: float) -> float:
    """Give the FLOP/s of products of square matrices; 0 where the device has none of that dtype."""
    together()
    try:
        with _fp32_as(name):
            a = torch.ones(side, side, device=device, dtype=DTYPES[name])
            out = torch.empty_like(a)
            return 2 * side**3 / timed(lambda: torch.mm(a, a, out=out), device, seconds=seconds)
    except (RuntimeError, TypeError):
        return 0.0


@contextlib.contextmanager
def _fp32_as(name: str) -> Iterator[None]:
    """Let products of float32 be what they are called, whatever the job has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _memory(device: torch.device, num_bytes: int, seconds: float) -> float:
    """Give the bytes a second of adding in place: two are read and one is written, to a line that is in the cache."""
    a, b = (torch.zeros(num_bytes // 4, device=device) for _ in range(2))
    together()
    return 3 * num_bytes / timed(lambda: a.add_(b), device, seconds=seconds)


def _smallest(device: torch.device, seconds: float) -> float:
    a = torch.zeros(8, device=device)
    together()
    return timed(lambda: a.add_(1.0), device, seconds=seconds)


def measure_overlap(transport: Transport, device: torch.device) -> float | None:
    """Give by how much products slow down while the backend adds up over all ranks; None where nothing runs beside.

    Ranks that share memory communicate in the thread that computes.
    """
    if not isinstance(transport, ProcessGroupTransport) or dist.get_world_size() == 1:
        return None
    a = torch.ones(SIDES["cpu" if device.type == "cpu" else "other"][0], device=device).expand(512, -1).contiguous()
    b, out = a.t().contiguous(), torch.empty(512, 512, device=device)
    flats = [torch.zeros(OVERLAP_BYTES // 4, device=device) for _ in range(2)]
    products = 64

    def compute() -> float:
        start = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b, out=out)
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # not the backend's, which goes on
        return time.perf_counter() - start

    def communicate(times: int) -> list[Any]:
        return [dist.all_reduce(flats[k % 2], async_op=True) for k in range(times)]

    def beside(times: int) -> float:
        together()
        works = communicate(times)
        found = compute()
        for work in works:
            work.wait()
        synchronize(device)
        return found

    beside(1)
    alone = _agree((statistics.median(beside(0) for _ in range(5)),))[0]
    start = time.perf_counter()
    for work in communicate(4):
        work.wait()
    synchronize(device)
    (one,) = _agree(((time.perf_counter() - start) / 4,))
    times = max(2, min(64, math.ceil(1.5 * alone / one)))  # enough of them to last as long as the products do
    (slow,) = _agree((statistics.median(beside(times) for _ in range(5)),))
    return max(1.0, slow / alone)


# ---- what ranks tell one another ---------------------------------------------------------------------------


def groups_to_measure(world: int, *, quick: bool) -> list[Group]:
    """List the groups whose exchanges are measured: all ranks, and unless ``quick`` the first 2, 4 and 8."""
    counts = {world, *(() if quick else (g for g in (2, 4, 8) if g < world))}
    return [tuple(range(count)) for count in sorted(counts)]


def measure_links(transport: Transport, hosts: Sequence[Group], device: torch.device, *, quick: bool) -> Links:
    """Measure messages inside a host and between hosts, exchanges of gradients, and what the backend offers.

    ``transport`` was made with the groups of :func:`groups_to_measure`; ``hosts`` are the ranks of each host.
    """
    world = sum(map(len, hosts))
    if world == 1:
        return Links()
    sizes, each = QUICK_SIZES if quick else FULL_SIZES, LINK_SECONDS[quick]
    inside = next((host[:2] for host in hosts if len(host) > 1), None)
    across = (hosts[0][0], hosts[1][0]) if len(hosts) > 1 else None
    ways = {pair: _messages(transport, pair, device, sizes, each) for pair in (inside, across) if pair}
    message, send = ways[inside or across]  # type: ignore[index]
    tables = [Measured(kind="message", group=2, points=message), Measured(kind="send", group=2, points=send)]
    for group in groups_to_measure(world, quick=quick):
        points = _exchanges(transport, group, device, sizes, each)
        tables += [Measured(kind="exchange", group=len(group), points=points)] if points else []
        tables += [] if quick else _collectives(group, device, sizes, each)
    near, far = (ways[pair][0] if pair else () for pair in (inside, across))
    return Links(tables=tuple(tables), near=near, far=far)


def _measure(
    prepare: Callable[[int], Round | None], sizes: Sequence[int], seconds: float, parts: int = 1
) -> list[Points]:
    """Give a table of seconds by size for each part of an operation: of each size's medians in some turns the least.

    ``prepare(size)`` gives what runs one round, or None for a rank that only waits; every rank then takes part in the
    same number of rounds. A round that takes for ever (infinity) cannot be had, and ends the table.
    """
    found: list[tuple[float, ...]] = []
    short = len(sizes)
    for _ in range(TURNS):
        turn = list(_turn(prepare, sizes[:short], seconds / TURNS, parts))
        better = [tuple(map(min, zip(a, b, strict=True))) for a, b in zip(found, turn, strict=False)]
        found = better + max(found, turn, key=len)[len(better) :]
        short = sum(each[0] < LONG for each in found)
    return [_smoothed(sizes, part) for part in zip(*found, strict=True)] if found else [() for _ in range(parts)]


def _turn(
    prepare: Callable[[int], Round | None], sizes: Sequence[int], seconds: float, parts: int
) -> Iterator[tuple[float, ...]]:
    """Measure size after size, each for about ``seconds``, as long as none takes too long."""
    nothing = (0.0,) * parts
    for size in sizes:
        together()
        run = prepare(size)
        first = _agree(run() if run else nothing)
        first = first if math.isinf(first[0]) else _agree(run() if run else nothing)
        if math.isinf(first[0]):
            return
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(seconds / first[0])))
        times = [run() for _ in range(rounds)] if run else [nothing]
        took = _agree(tuple(statistics.median(part) for part in zip(*times, strict=True)))
        yield took
        if took[0] > TOO_LONG / 4:
            return


def _smoothed(sizes: Sequence[int], seconds: Sequence[float]) -> Points:
    """Let no size take longer than a larger one took."""
    return tuple((float(size), min(seconds[k:])) for k, size in zip(range(len(seconds)), sizes, strict=False))


def _agree(values: tuple[float, ...]) -> tuple[float, ...]:
    """Give every rank the largest of all ranks' values, one by one."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, values)
    return tuple(map(max, zip(*told, strict=True)))


def _drive(steps: Generator[None, None, Any]) -> Any:
    """Run a generator of the transport to its end; give what it gives."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


# ---- messages ------------------------------------------------------------------------------------------------


def _messages(
    transport: Transport, pair: Group, device: torch.device, sizes: Sequence[int], seconds: float
) -> tuple[Points, Points]:
    """Let two ranks send a value to and fro; give the seconds of one way, and those of the sender alone."""
    first, second = pair
    tags = iter(range(0, 1 << 20, 2))

    def prepare(size: int) -> Round | None:
        if transport.rank not in pair:
            return None
        value = torch.ones(size, dtype=torch.uint8, device=device)
        leads, other = transport.rank == first, second if transport.rank == first else first

        def receive(tag: int) -> None:
            _drive(wait_for(transport.receive(size, other, tag)))

        def run() -> tuple[float, ...]:
            tag = next(tags)
            if not leads:
                receive(tag)
            begun = time.perf_counter()
            transport.send(value, other, tag + (not leads))  # even tags go one way of a pipeline, odd ones the other
            sent = time.perf_counter()
            if leads:
                receive(tag + 1)
            transport.flush()
            synchronize(device)
            way = (time.perf_counter() - begun) / 2
            return (way, min(way, sent - begun)) if leads else (0.0, 0.0)

        return run

    way, send = _measure(prepare, sizes, seconds, parts=2)
    return way, send


# ---- exchanges of gradients ------------------------------------------------------------------------------------


def _exchanges(
    transport: Transport, group: Group, device: torch.device, sizes: Sequence[int], seconds: float
) -> Points:
    """Measure the exact sum of gradients over the replicas of a group, each with one node of the tree.

    Where replicas share memory it begins with all gradients in their rows, and ends when all ranks may read the sums.
    """

    def prepare(size: int) -> Round | None:
        if transport.rank not in group:
            _agree((0.0,))
            return None
        reach = Reach.of(transport, group) if device.type == "cpu" else None
        run = _shared_exchange(transport, reach, size) if reach else None
        (missing,) = _agree((float(run is None),))
        return _message_exchange(transport, group, size, device) if missing or run is None else run

    return _measure(prepare, sizes, seconds)[0]


def _shared_exchange(transport: Transport, reach: Reach, size: int) -> Round | None:
    """Give a round of the reduction in shared memory; None where the memory cannot be had."""
    group, me = reach.group, reach.group.index(transport.rank)
    like = torch.empty(size // 4)
    layout = RowLayout.of([like])
    reducer = SharedReducer(transport, reach, [[0]], layout, exact=True)
    ranges = [(k, k + 1) for k in range(len(group))]
    if not _drive(reducer.prepare(len(group), ranges)):
        return None
    start, stop = layout.share(reducer.me, len(reach.here))

    def run() -> tuple[float, ...]:
        reducer.begin(len(group), ranges, presence_known=True, likes=[like])
        places = reducer.place(0, me)
        assert places is not None and places[0] is not None
        places[0].fill_(1.0)  # as a backward does, in this rank's own caches
        reducer.push(0, me, list(places))
        reducer.launch_rest()
        _drive(wait_for(transport.meet(group)))
        begun = time.perf_counter()
        _drive(wait_for(transport.tell((0.0, 0.0, 0.0), group)))  # as losses are told
        if start < stop:
            _drive(reducer.fold(start, stop, torch.float32))
        _drive(wait_for(transport.meet(reach.here)))
        return (time.perf_counter() - begun,)

    return run


def _message_exchange(transport: Transport, group: Group, size: int, device: torch.device) -> Round:
    """Give a round of the reduction by messages: buckets of gradients, all on their way before one is waited for."""
    me = group.index(transport.rank)
    count = -(-size // LARGEST_SITE)
    likes = [torch.ones(size // 4 // count, device=device) for _ in range(count)]
    buckets = make_buckets([like.numel() * 4 for like in likes])
    reducer = Reducer(transport, group, buckets, exact=True)
    ranges = [(k, k + 1) for k in range(len(group))]

    def run() -> tuple[float, ...]:
        reducer.begin(len(group), ranges, presence_known=True, likes=likes)
        for index, sites in enumerate(buckets):
            reducer.push(index, me, [torch.ones_like(likes[site]) for site in sites])
        _drive(wait_for(transport.meet(group)))
        synchronize(device)
        begun = time.perf_counter()
        _drive(reducer.finish())
        transport.flush()
        synchronize(device)
        return (time.perf_counter() - begun,)

    return run


# ---- what the backend offers ---------------------------------------------------------------------------------


def _collectives(group: Group, device: torch.device, sizes: Sequence[int], seconds: float) -> list[Measured]:
    """Measure the backend's collectives in a group, by the bytes of the whole tensor; those that it has."""
    whole = len(group) == dist.get_world_size()
    handle = dist.group.WORLD if whole else dist.new_group(list(group))
    member = dist.get_rank() in group
    found = []
    for kind in COLLECTIVES:

        def prepare(size: int, kind: str = kind) -> Round | None:
            return _collective(kind, size, group, handle, device) if member else None

        (points,) = _measure(prepare, sizes, seconds)
        found += [Measured(kind=kind, group=len(group), points=points)] if points else []
    if not whole and member:
        dist.destroy_process_group(handle)
    return found


def _collective(kind: str, size: int, group: Group, handle: Any, device: torch.device) -> Round:
    whole = torch.zeros(max(1, size // 4 // len(group)) * len(group), device=device)
    part, other = torch.zeros(whole.numel() // len(group), device=device), torch.empty_like(whole)
    call: Callable[[], Any] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=handle),
        "reduce-scatter": lambda: _reduce_scatter(part, whole, group=handle),
        "all-gather": lambda: _all_gather(whole, part, group=handle),
        "broadcast": lambda: dist.broadcast(whole, group[0], group=handle),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=handle),
    }[kind]

    def run() -> tuple[float, ...]:
        begun = time.perf_counter()
        try:
            call()
        except (RuntimeError, NotImplementedError):  # not every backend has all of them
            return (math.inf,)
        synchronize(device)
        return (time.perf_counter() - begun,)

    return run


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
