"""The transport between CPU ranks of one host: messages through shared memory.

::

    ring of each pair of ranks      | slot | slot | slot | ...      tag and length; small contents stand here,
    arena of each rank              | block | block |               large ones in a block that the receiver then keeps

A send copies once; the tensor that is received is the sender's block.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import struct
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import semaphores
from .arena import Arena, Borrowed
from .segment import Address, Segment, SharedMemoryError
from .semaphores import DEADLINE_SECONDS, SIZE, SLICE_SECONDS, Waiter
from .transport import Group, Pending, done

SLOTS = 32
HEAD = struct.Struct("=5q")  # of a slot: tag, length, segment, place in it, bytes of a new segment's address
HERE, BYTES = -1, -2  # in place of the segment: the contents stand in the slot, a tensor's or plain bytes
Contents = Tensor | bytes
CONTENTS = 64  # bytes from a slot's begin to what it holds
INLINE = 4096 - CONTENTS
SLOT = CONTENTS + INLINE
FILLED, FREE, MET = 0, SIZE, 2 * SIZE  # semaphores of a pair of ranks, before its ring
RING = 4 * SIZE
PAIR = RING + SLOTS * SLOT
COLLECTIVE = 1 << 60  # tags of collectives lie above those of a program
ROUNDS_BITS = 26  # of them; the name of the group stands above these


class SharedTransport:
    """Reach the other ranks of this host. Every rank makes it, with the control segment of all.

    ``processes`` maps the ranks of this host to their process numbers; ``spins`` and ``deadline`` are
    those of a :class:`Waiter`.
    """

    def __init__(
        self,
        rank: int,
        control: Segment,
        processes: Mapping[int, int],
        *,
        spins: int,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self.rank, self.control = rank, control
        self.places = {r: k for k, r in enumerate(processes)}
        self.note = ""  # why memory could not be shared
        self.base = control.bytes.data_ptr()
        self.to = {r: self._pair(rank, r) for r in processes}
        self.source = {r: self._pair(r, rank) for r in processes}
        others = {r: pid for r, pid in processes.items() if r != rank}
        self.waiter = Waiter(rank, others, spins=spins, deadline=deadline)
        self.waiter.meanwhile = self._push_on
        self.arena, self.borrowed = Arena(), Borrowed()
        self.known: set[tuple[int, int]] = set()  # (rank, own segment): it has mapped it
        self.sent, self.got = dict.fromkeys(processes, 0), dict.fromkeys(processes, 0)
        self.outbox: dict[int, deque[tuple[Contents, int]]] = {r: deque() for r in processes}
        self.arrived: dict[int, defaultdict[int, deque[Contents]]] = {r: defaultdict(deque) for r in processes}
        self.tags: dict[Group, Iterator[int]] = {}

    @staticmethod
    def make_control(count: int) -> Segment:
        """Make the control segment of ``count`` ranks. One of them calls it, and tells the others its address."""
        control = Segment.create(count * count * PAIR)
        base = control.bytes.data_ptr()
        for pair in range(count * count):
            for place, value in ((FILLED, 0), (FREE, SLOTS), (MET, 0)):
                semaphores.create(base + pair * PAIR + place, value)
        return control

    def _pair(self, source: int, to: int) -> int:
        """Give where the semaphores and the ring of two ranks begin in the control segment."""
        return (self.places[source] * len(self.places) + self.places[to]) * PAIR

    # ---- sending -----------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send a contiguous tensor; never waits: where the ring is full it stays in the outbox."""
        assert tensor.is_contiguous()
        self._send(tensor, to, tag)

    def _send(self, flat: Contents, to: int, tag: int) -> None:
        if not self.outbox[to] and semaphores.take(self.base + self.to[to] + FREE):
            self._put(flat, to, tag)
        else:
            self.outbox[to].append((flat, tag))
            self._push_on()

    def _push_on(self) -> bool:
        """Send what is in the outbox, as far as there is room; tell whether something is left."""
        for to, waiting in self.outbox.items():
            while waiting and semaphores.take(self.base + self.to[to] + FREE):
                flat, tag = waiting.popleft()
                self._put(flat, to, tag)
        return any(self.outbox.values())

    def _put(self, flat: Contents, to: int, tag: int) -> None:
        """Fill the next slot, which is free."""
        pair = self.to[to]
        slot = pair + RING + self.sent[to] % SLOTS * SLOT
        self.sent[to] += 1
        start = slot + CONTENTS
        if isinstance(flat, bytes):
            length = len(flat)
            self.control.map[start : start + length] = flat
            HEAD.pack_into(self.control.map, slot, tag, length, BYTES, 0, 0)
        elif (length := flat.numel() * flat.element_size()) <= INLINE:
            semaphores.copy(self.base + start, flat.data_ptr(), length)
            HEAD.pack_into(self.control.map, slot, tag, length, HERE, 0, 0)
        else:
            block = self.arena.take(length)
            ctypes.memmove(block.memory, flat.data_ptr(), length)
            address = self._address(to, block.segment)
            self.control.map[start : start + len(address)] = address
            HEAD.pack_into(self.control.map, slot, tag, length, block.segment, block.at, len(address))
        semaphores.post(self.base + pair + FILLED)

    def _address(self, to: int, segment: int) -> bytes:
        """Give a segment's address where a rank does not know it yet."""
        if (to, segment) in self.known:
            return b""
        self.known.add((to, segment))
        return pickle.dumps(self.arena.segments[segment].address)

    def flush(self) -> None:
        """Wait until everything is on its way."""
        for to, waiting in self.outbox.items():
            while waiting:
                free = self.base + self.to[to] + FREE
                self.waiter.wait(free, to)
                semaphores.post(free)  # the wait itself may have sent the last message
                self._push_on()

    # ---- receiving ---------------------------------------------------------------------------------------

    def receive(self, num_bytes: int, source: int, tag: int) -> Pending:
        """Give the next tensor that ``source`` sends under ``tag``."""

        def wait() -> Tensor:
            found: Tensor = self._take(source, tag)
            if found.numel() != num_bytes:
                raise RuntimeError(
                    f"rank {self.rank} expects {num_bytes} bytes from rank {source} (tag {tag}), which sent "
                    f"{found.numel()}; do both run the same step of the same model?"
                )
            return found

        return _later(wait)

    def _take(self, source: int, tag: int) -> Any:
        arrived = self.arrived[source]
        while tag not in arrived:
            found, flat = self._next(source)
            if found == tag:
                return flat
            arrived[found].append(flat)
        first = arrived[tag].popleft()
        if not arrived[tag]:
            del arrived[tag]
        return first

    def _next(self, source: int) -> tuple[int, Contents]:
        """Empty the next slot of a ring, waiting for it to be filled."""
        pair = self.source[source]
        self.waiter.wait(self.base + pair + FILLED, source)
        slot = pair + RING + self.got[source] % SLOTS * SLOT
        self.got[source] += 1
        tag, length, segment, at, size = HEAD.unpack_from(self.control.map, slot)
        start = slot + CONTENTS
        flat: Contents
        if segment == BYTES:
            flat = self.control.map[start : start + length]
        elif segment == HERE:
            flat = torch.empty(length, dtype=torch.uint8)
            semaphores.copy(flat.data_ptr(), self.base + start, length)
        else:
            if size:
                address: Address = pickle.loads(self.control.map[start : start + size])
                self._map(source, segment, address)
            flat = self.borrowed.tensor(source, segment, at, length)
        semaphores.post(self.base + pair + FREE)
        return tag, flat

    def _map(self, source: int, segment: int, address: Address) -> None:
        try:
            self.borrowed.add(source, segment, address)
        except SharedMemoryError as error:
            if self.waiter.peers[source].lives(patience=SLICE_SECONDS):
                raise
            raise self.waiter.lost(source) from error

    # ---- collectives -------------------------------------------------------------------------------------

    def _tag(self, group: Group) -> int:
        """Number the collectives of a group, all members alike."""
        if group not in self.tags:
            self.tags[group] = itertools.count(COLLECTIVE + (zlib.crc32(repr(group).encode()) << ROUNDS_BITS))
        return next(self.tags[group])

    def tell(self, row: Sequence[float], group: Group) -> Pending:
        """List every member's row of numbers; long ones go as tensors."""
        form = struct.Struct(f"={len(row)}d")
        if form.size > INLINE:
            pending = self.all_gather(torch.tensor(row, dtype=torch.float64), group)
            return _later(lambda: [tuple(part.tolist()) for part in pending.wait()])
        told = self._tell(form.pack(*row), group)
        return _later(lambda: [form.unpack(data) for data in told()])

    def _tell(self, mine: bytes, group: Group) -> Callable[[], list[bytes]]:
        """Send the same few bytes to all members; give what collects theirs."""
        tag = self._tag(group)
        for member in group:
            if member != self.rank:
                self._send(mine, member, tag)
        return lambda: [mine if m == self.rank else self._take(m, tag) for m in group]

    def _exchange(self, parts: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        """Send the j-th tensor to member j; give what collects theirs as flat bytes, the own part untouched."""
        tag = self._tag(group)
        for member, part in zip(group, parts, strict=True):
            if member != self.rank:
                self.send(part, member, tag)
        mine = parts[group.index(self.rank)]
        return lambda: [mine if m == self.rank else self._take(m, tag) for m in group]

    def all_gather(self, tensor: Tensor, group: Group) -> Pending:
        """List every member's tensor."""
        mine = tensor.contiguous().clone()
        if mine.numel() * mine.element_size() > INLINE or not mine.numel():
            collect = self._exchange([mine] * len(group), group)
            return _later(lambda: [t.view(mine.dtype).view(mine.shape) for t in collect()])
        told = self._tell(ctypes.string_at(mine.data_ptr(), mine.numel() * mine.element_size()), group)

        def wait() -> list[Tensor]:
            return [torch.frombuffer(bytearray(data), dtype=mine.dtype).view(mine.shape) for data in told()]

        return _later(wait)

    def all_gather_object(self, value: Any, group: Group) -> Pending:
        """List every member's value."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        collect = self._exchange([data] * len(group), group)
        return _later(lambda: [pickle.loads(bytes(t.numpy())) for t in collect()])

    def all_to_all(self, sent: Tensor, lengths: list[int], got: Tensor, sizes: list[int], group: Group) -> Pending:
        """Exchange parts; those of others are views of the memory they came in."""
        parts = list(torch.split(sent, lengths))
        me = group.index(self.rank)
        parts[me] = torch.split(got, sizes)[me].copy_(parts[me])
        collect = self._exchange(parts, group)
        return _later(lambda: [t.view(got.dtype) for t in collect()])

    def all_gather_row(self, mine: Tensor, total: Tensor, group: Group) -> Pending:
        """Fill ``total`` with the members' rows."""
        collect = self._exchange([mine] * len(group), group)

        def wait() -> Tensor:
            for place, row in zip(total.chunk(len(group)), collect(), strict=True):
                place.copy_(row.view(mine.dtype).view(place.shape))
            return total

        return _later(wait)

    def all_reduce(self, flat: Tensor, group: Group) -> Pending:
        """Add up in rank order: each member a part, which it tells to all."""
        parts = list(torch.tensor_split(flat, len(group)))
        collect = self._exchange(parts, group)

        def wait() -> Tensor:
            me = group.index(self.rank)
            mine = parts[me]
            _add_in_order([t.view(flat.dtype) for t in collect()], me)
            for place, row in zip(parts, self._exchange([mine] * len(group), group)(), strict=True):
                if place is not mine:
                    place.copy_(row.view(flat.dtype))
            return flat

        return _later(wait)

    def neighbours(self, group: Group) -> list[Group]:
        """List the members by host: there is one."""
        return [group]

    def meet(self, group: Group) -> Pending:
        """Say that this rank is here, and wait for every member."""
        others = [m for m in group if m != self.rank]
        for member in others:
            semaphores.post(self.base + self.to[member] + MET)

        def wait() -> None:
            for member in others:
                self.waiter.wait(self.base + self.source[member] + MET, member)

        return _later(wait)

    def share(self, num_bytes: int, group: Group) -> Pending:
        """Map one segment in all members; None on all where one of them cannot, and ``note`` says why."""
        segment: Segment | None = None
        first = group[0]
        try:
            segment = Segment.create(num_bytes) if self.rank == first else None
            told: Any = None if segment is None else segment.address
        except SharedMemoryError as error:
            told = str(error)
        (address, *_) = self.all_gather_object(told, group).wait()
        problem = address if isinstance(address, str) else ""
        if not problem and segment is None:
            try:
                segment = Segment.attach(address)
            except SharedMemoryError as error:
                problem = str(error)
        problems = [p for p in self.all_gather_object(problem, group).wait() if p]
        self.note = problems[0] if problems else ""
        return done(None if problems else segment)


def _add_in_order(parts: list[Tensor], me: int) -> None:
    """Add up all parts, the first to the second and so on, into the own one (a + b is b + a)."""
    mine = parts[me]
    if me < 2:
        for part in (*parts[1 - me : 2 - me], *parts[2:]):
            mine += part
        return
    total = parts[0]
    for part in parts[1:]:
        total += part
    mine.copy_(total)


def _later(wait: Callable[[], Any]) -> Pending:
    return Pending(lambda: True, wait)

