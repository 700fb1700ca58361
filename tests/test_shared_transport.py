"""Messages through shared memory: the same as in one process, in the order they were sent, without growth."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.parallel import semaphores
from meshwise.parallel.connect import connect
from meshwise.parallel.segment import Segment
from meshwise.parallel.shared import COLLECTIVE, FREE, INLINE, SLOTS, SharedTransport
from meshwise.parallel.transport import Group, Mailroom, MemoryTransport, Transport, wait_for
from meshwise.runtime.worker import drive, drive_together
from scenarios import same

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name needs Linux"),
]
Results = Generator[None, None, list[Any]]
CPU = torch.device("cpu")
BIG = 100_003  # bytes that do not fit in a slot


def in_ranks(function: Callable[[SharedTransport, RankContext], Any], num_ranks: int) -> list[Any]:
    """Run a function in ranks that must share memory."""

    def job(context: RankContext) -> Any:
        os.environ["MESHWISE_TRANSPORT"] = "shared"
        transport = connect(context.rank, [], context.device)
        assert isinstance(transport, SharedTransport)
        return function(transport, context)

    return run_ranks(job, num_ranks, device="cpu", timeout=60)


# ---- the same as in one process --------------------------------------------------------------------------


def numbers(count: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Give numbers whose sum depends on the order, others on each rank."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    drawn = torch.randn(count, generator=generator) * 10 ** (6 * torch.rand(count, generator=generator) - 3)
    return drawn.to(dtype)


def payloads(rank: int) -> list[Tensor]:
    """Give tensors of all kinds: no bytes, no dims, odd sizes, sizes around what fits in a slot."""
    sizes = (0, 1, 3, INLINE - 1, INLINE, INLINE + 1, 2 * INLINE + 5, BIG, 1 << 20)
    return [
        *(numbers(size, rank, torch.int8) for size in sizes),
        numbers(1, rank, torch.float64).view(()),
        torch.tensor(rank % 2 == 0),
        torch.empty(0, 3),
        numbers(7, rank, torch.bfloat16),
        numbers(30, rank).view(2, 3, 5),
        numbers(INLINE // 4, rank).view(-1, 4),
        numbers(INLINE // 8 + 1, rank, torch.float64),
    ]


def messages(transport: Transport, count: int) -> Results:
    """Send every payload around, then messages of several tags that are received in another order."""
    me, found = transport.rank, []
    after, before = (me + 1) % count, (me - 1) % count
    for tag, tensor in enumerate(payloads(me)):
        transport.send(tensor, after, tag)
    for tag, like in enumerate(payloads(before)):
        got = yield from wait_for(transport.receive(like.numel() * like.element_size(), before, tag))
        assert got.dtype == torch.uint8 and got.shape == (like.numel() * like.element_size(),)
        found.append(got.view(like.dtype).view(like.shape))
        assert same(found[-1], like)
    for k, tag in enumerate((5, 6, 5, 7, 5)):
        transport.send(torch.full((1 if k % 2 else BIG,), 10 * me + k, dtype=torch.uint8), after, tag)
    for k, tag in ((3, 7), (0, 5), (2, 5), (1, 6), (4, 5)):
        got = yield from wait_for(transport.receive(1 if k % 2 else BIG, before, tag))
        assert got[0] == got[-1] == 10 * before + k
    transport.flush()
    return found


def groups_of(count: int) -> list[Group]:
    """Give all ranks, the first and the last, all but the first, and one alone."""
    return list(dict.fromkeys([tuple(range(count)), (0, count - 1), tuple(range(1, count)), (0,)]))


def collectives(transport: Transport, count: int) -> Results:
    """Call every collective on every group, those of different groups in turns."""
    found = []
    for group in groups_of(count):
        if transport.rank in group:
            found += yield from gathers(transport, group)
            found += yield from sums(transport, group)
            found += yield from exchanges(transport, group)
            yield from wait_for(transport.meet(group))
    transport.flush()
    return found


def gathers(transport: Transport, group: Group) -> Results:
    me, found = transport.rank, []
    for tensor in [*payloads(me), numbers(12, me).view(3, 4).t()]:
        found += yield from wait_for(transport.all_gather(tensor, group))
    for value in (None, me, {"rank": me, "tensor": numbers(5, me)}, "x" * (10 + INLINE * me)):
        found += yield from wait_for(transport.all_gather_object(value, group))
    for size in (0, 3, INLINE):
        mine, total = numbers(size, me), torch.full((size * len(group),), torch.nan)
        result = yield from wait_for(transport.all_gather_row(mine, total, group))
        assert result is total
        found.append(total)
    return found


def sums(transport: Transport, group: Group) -> Results:
    me, found = transport.rank, []
    for size in (0, 1, 2, 7, INLINE, BIG):
        flat = numbers(size, me)
        result = yield from wait_for(transport.all_reduce(flat, group))
        assert result is flat
        found.append(flat)
    flats = [numbers(size, me, torch.float64) for size in (5, BIG, 6)]
    started = [transport.all_reduce(flat, group) for flat in flats]
    between = transport.all_gather(numbers(2, me), group)
    for pending in started:
        found.append((yield from wait_for(pending)))
    return found + (yield from wait_for(between))


def exchanges(transport: Transport, group: Group) -> Results:
    """Exchange uneven parts, some of them empty, small and large."""
    me, found = transport.rank, []

    def length(source: int, to: int, scale: int) -> int:
        return (3 * source + 5 * to) % 7 * scale

    for scale in (1, INLINE // 4, 0):
        lengths = [length(me, m, scale) for m in group]
        sizes = [length(m, me, scale) for m in group]
        got = torch.full((sum(sizes),), torch.nan)
        sent = numbers(sum(lengths), me)
        parts = yield from wait_for(transport.all_to_all(sent, lengths, got, sizes, group))
        assert [len(part) for part in parts] == sizes and all(part.dtype == got.dtype for part in parts)
        found += [part.clone() for part in parts]
    return found


def memory(transport: Transport, count: int) -> Results:
    """Share a segment with every group: all members write to it, meet, and read what the others wrote."""
    found = []
    for group in groups_of(count):
        if transport.rank in group:
            segment = yield from wait_for(transport.share(count * 5000, group))
            assert isinstance(segment, Segment) and not segment.bytes.any()
            yield from wait_for(transport.meet(group))
            segment.bytes.view(count, 5000)[transport.rank] = transport.rank + 1
            yield from wait_for(transport.meet(group))
            found.append(segment.bytes.clone())
    return found


SCRIPTS = (messages, collectives, memory)


def in_turns(count: int) -> list[list[list[Any]]]:
    """Run the scripts over MemoryTransport, each rank in turns; what each rank found, by script."""
    room = Mailroom()
    transports = [MemoryTransport(rank, room) for rank in range(count)]
    by_script = [drive_together([script(t, count) for t in transports]) for script in SCRIPTS]
    return [list(found) for found in zip(*by_script, strict=True)]


def alike(a: Any, b: Any) -> bool:
    """Tell whether two values are the same, tensors to the bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same(a, b)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_gives_what_it_gives_in_one_process(count: int) -> None:
    """Messages, collectives over several groups and shared segments: real ranks get the same bits."""
    found = in_ranks(lambda transport, _: [drive(script(transport, count)) for script in SCRIPTS], count)
    expected = in_turns(count)
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for script, results, wanted in zip(SCRIPTS, mine, theirs, strict=True):
            assert len(results) == len(wanted)
            for k, (a, b) in enumerate(zip(results, wanted, strict=True)):
                assert alike(a, b), f"{script.__name__} {k} on rank {rank}: {a} for {b}"


# ---- under load, in ranks --------------------------------------------------------------------------------


def many(rank: int) -> list[Tensor]:
    """Give 200 messages, every seventh large."""
    return [torch.full((BIG if k % 7 == 0 else k % 5,), (k + 3 * rank) % 251, dtype=torch.uint8) for k in range(200)]


def flood(transport: SharedTransport, context: RankContext) -> dict[str, Any]:
    """Send 200 messages to the other rank before either receives one."""
    other = 1 - transport.rank
    for tensor in many(transport.rank):
        transport.send(tensor, other, 1)
    left = len(transport.outbox[other])
    dist.barrier()
    expected = many(other)
    right = [torch.equal(transport.receive(len(t), other, 1).wait(), t) for t in expected]
    transport.flush()
    dist.barrier()
    return {"left": left, "right": right, "outbox": len(transport.outbox[other])}


def keep(transport: SharedTransport, context: RankContext) -> dict[str, Any]:
    """Keep a large tensor while the sender reuses its own and sends 20 more."""
    if transport.rank == 0:
        tensor = torch.full((BIG,), 1.5)
        for k in range(21):
            transport.send(tensor, 1, 1)
            transport.flush()
            tensor.fill_(10.0 + k)
        dist.barrier()
        return {}
    first = transport.receive(4 * BIG, 0, 1).wait().view(torch.float32)
    part = transport.receive(4 * BIG, 0, 1).wait().view(torch.float32)[5:8]
    later = [float(transport.receive(4 * BIG, 0, 1).wait().view(torch.float32)[-1]) for _ in range(19)]
    dist.barrier()
    kept = bool((first == 1.5).all())
    first += 1  # it is the receiver's own
    return {"kept": kept, "part": part.tolist(), "later": later, "changed": float(first[7])}


def round_of_messages(transport: SharedTransport) -> None:
    other, group = 1 - transport.rank, (0, 1)
    for size in (10, BIG, BIG, 5 * BIG):
        transport.send(torch.zeros(size, dtype=torch.uint8), other, 3)
    for size in (10, BIG, BIG, 5 * BIG):
        transport.receive(size, other, 3).wait()
    transport.all_reduce(torch.zeros(BIG), group).wait()
    transport.all_gather(torch.zeros(BIG), group).wait()
    transport.all_gather_object("x" * BIG, group).wait()
    transport.meet(group).wait()


def go_round(transport: SharedTransport, context: RankContext) -> dict[str, Any]:
    """Exchange the same again and again; count segments, mapped ones, blocks and open files."""

    def counts() -> tuple[int, ...]:
        gc.collect()
        blocks = sum(map(len, transport.arena.blocks.values()))
        return len(transport.arena.segments), len(transport.borrowed.segments), blocks, len(os.listdir("/proc/self/fd"))

    round_of_messages(transport)
    begin = counts()
    for _ in range(40):
        round_of_messages(transport)
    return {"begin": begin, "end": counts(), "waiting": sum(map(len, transport.arrived[1 - transport.rank].values()))}


@pytest.fixture(scope="module")
def loaded() -> list[dict[str, dict[str, Any]]]:
    """Run all that needs two ranks and much traffic, in the same two ranks; what each found, by name."""
    parts = (flood, keep, go_round)
    return in_ranks(lambda transport, context: {p.__name__: p(transport, context) for p in parts}, 2)


def test_a_full_ring_makes_nobody_wait(loaded: Any) -> None:
    """Two ranks send each other 200 messages before either receives one: all arrive, whole and in order."""
    for found in (rank["flood"] for rank in loaded):
        assert found["left"] == 200 - SLOTS
        assert all(found["right"]) and len(found["right"]) == 200
        assert found["outbox"] == 0


def test_a_large_tensor_stays_as_it_was_received(loaded: Any) -> None:
    """What a receiver keeps, whole or a part of it, does not change with what the sender does later."""
    found = loaded[1]["keep"]
    assert found["kept"] and found["changed"] == 2.5
    assert found["part"] == [10.0] * 3
    assert found["later"] == [11.0 + k for k in range(19)]


def test_messages_that_are_alike_need_no_more_memory(loaded: Any) -> None:
    """After the first round no segment is made or mapped, no block added, no file left open, nothing piled up."""
    for found in (rank["go_round"] for rank in loaded):
        assert found["begin"] == found["end"]
        assert found["waiting"] == 0


# ---- in one process ----------------------------------------------------------------------------------------


def pair() -> tuple[SharedTransport, SharedTransport]:
    """Make the transports of two ranks in this process."""
    control = SharedTransport.make_control(2)
    processes = {0: os.getpid(), 1: os.getpid()}
    first, second = (SharedTransport(rank, Segment.attach(control.address), processes, spins=1) for rank in (0, 1))
    return first, second


def test_the_end_of_a_flush_may_come_while_it_waits() -> None:
    """A flush that sends its last message during a long wait ends there, and takes no place for another one."""
    first, second = pair()
    for k in range(SLOTS + 1):
        first.send(torch.tensor([k]), 1, 1)

    def meanwhile() -> bool:
        taken.extend(int(second.receive(8, 0, 1).wait().view(torch.int64)) for _ in range(2) if len(taken) < SLOTS)
        return first._push_on()

    taken: list[int] = []
    first.waiter.meanwhile = meanwhile
    first.flush()
    taken += [int(second.receive(8, 0, 1).wait().view(torch.int64)) for _ in range(SLOTS + 1 - len(taken))]
    assert taken == list(range(SLOTS + 1))
    free = first.base + first._pair(0, 1) + FREE
    assert [semaphores.take(free) for _ in range(SLOTS + 1)] == [True] * SLOTS + [False]


def test_a_slot_is_free_once_its_message_is_taken() -> None:
    """A ring goes round many times, in both directions, without a message lost or doubled."""
    first, second = pair()
    for k in range(5 * SLOTS):
        first.send(torch.full((k % 3,), k), 1, 1)
        second.send(torch.full((BIG,), k % 251, dtype=torch.uint8), 0, 1)
        assert second.receive(8 * (k % 3), 0, 1).wait().view(torch.int64).tolist() == [k] * (k % 3)
        assert first.receive(BIG, 1, 1).wait()[-1] == k % 251
    assert len(first.arena.segments) == 0 and len(second.arena.segments) == 1


class Interrupted(Exception):
    pass


def test_a_signal_ends_a_wait() -> None:
    """A handler that raises (as Ctrl-C does) ends a wait that blocks, and no message is lost by it."""
    first, second = pair()

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            second.receive(8, 0, 1).wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    first.send(torch.tensor([5]), 1, 1)
    assert second.receive(8, 0, 1).wait().view(torch.int64).item() == 5


def test_a_message_of_another_length_is_refused() -> None:
    """Ranks that have got out of step are told so at the message, not by a shape somewhere later."""
    first, second = pair()
    first.send(torch.zeros(3), 1, 7)
    with pytest.raises(RuntimeError, match=r"rank 1 expects 8 bytes from rank 0 \(tag 7\), which sent 12"):
        second.receive(8, 0, 7).wait()


def test_groups_number_their_collectives_apart() -> None:
    """Groups of the same ranks, in any order of calls, never share a tag, and none is a tag of a program."""
    (transport, _), groups = pair(), [(0, 1), (0, 1, 2), (1, 2), (0, 2), (0,)]
    tags = [transport._tag(group) for _ in range(50) for group in groups]
    assert len(set(tags)) == len(tags)
    assert all(COLLECTIVE <= tag < 1 << 63 for tag in tags)
