"""The seam between ranks: what a program needs of a process group, and a version in memory for tests.

Every method that waits gives a :class:`Pending`; the interpreter polls ``ready()`` (always true for a process
group, whose ``wait()`` blocks) so that several ranks can also run in turns inside one process.
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .segment import Segment

Group = tuple[int, ...]

TELL_TAG = 1 << 26  # of an all-gather that goes as messages; what is small enough for one:
FEW_MEMBERS = 8
FEW_BYTES = 4096


class Pending:
    """Stand for a result that may not be there yet."""

    def __init__(self, ready: Callable[[], bool], wait: Callable[[], Any]) -> None:
        self.ready = ready
        self._wait = wait

    def wait(self) -> Any:
        """Give the result (only when ``ready()`` or the transport may block)."""
        return self._wait()


def done(value: Any) -> Pending:
    """Give a result that is already there."""
    return Pending(lambda: True, lambda: value)


def wait_for(pending: Pending) -> Generator[None, None, Any]:
    """Yield until a result is there, then give it."""
    while not pending.ready():
        yield
    return pending.wait()


class Transport(Protocol):
    """State what a program needs to reach the other ranks. Every rank of ``group`` makes each group call."""

    rank: int

    @property
    def note(self) -> str:
        """Say why memory is not shared."""

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send a contiguous tensor; never waits, keeps the tensor until it is gone."""

    def receive(self, num_bytes: int, source: int, tag: int) -> Pending:
        """Receive a tensor of so many bytes, as a flat uint8 tensor that is the caller's own to keep and change."""

    def all_reduce(self, flat: Tensor, group: Group) -> Pending:
        """Add up in place over the group in the backend's order."""

    def all_to_all(self, sent: Tensor, lengths: list[int], got: Tensor, sizes: list[int], group: Group) -> Pending:
        """Give the j-th part of ``sent`` (``lengths[j]`` elements) to member j, and fill ``got`` likewise.

        The result lists the parts of ``got``, ``sizes[j]`` elements from member j.
        """

    def all_gather_row(self, mine: Tensor, total: Tensor, group: Group) -> Pending:
        """Fill ``total`` with every member's row of one length, member after member."""

    def all_gather(self, tensor: Tensor, group: Group) -> Pending:
        """List every member's tensor (equal shapes)."""

    def tell(self, row: Sequence[float], group: Group) -> Pending:
        """List every member's row of numbers (all of one length, some hundreds at most)."""

    def all_gather_object(self, value: Any, group: Group) -> Pending:
        """List every member's picklable value."""

    def neighbours(self, group: Group) -> list[Group]:
        """Part a group in those that can share memory, in the group's order (a host each)."""

    def share(self, num_bytes: int, group: Group) -> Pending:
        """Give a :class:`Segment` of zeros that every member maps, or on every member None where one cannot."""

    def meet(self, group: Group) -> Pending:
        """Wait for every member; what they wrote to shared memory before is seen after."""

    def flush(self) -> None:
        """Wait until everything sent is gone."""


class ProcessGroupTransport:
    """Reach the other ranks through torch.distributed (gloo on CPU, NCCL and others elsewhere).

    Every rank makes it with the same list of groups, since making a process group is collective.
    """

    def __init__(self, rank: int, groups: Sequence[Group], device: torch.device) -> None:
        self.rank = rank
        self.note = ""  # why it is this one
        self.device = device
        world = tuple(range(dist.get_world_size()))
        self.groups: dict[tuple[Group, str], Any] = {}
        for group in dict.fromkeys((*groups, world)):
            for use in ("first", "second", "small") if len(group) > 1 else ():
                self.groups[group, use] = dist.new_group(list(group))
        self.outbox: list[tuple[Any, Tensor]] = []
        self.tagged = dist.get_backend() == "gloo"
        self.lanes = {d: dist.new_group(list(world)) for d in (0, 1)} if len(world) > 1 else {}

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send without waiting; even tags go one way of the pipeline, odd tags the other."""
        tensor = tensor.reshape(-1).view(torch.uint8)
        work = dist.isend(tensor, to, group=self.lanes[tag % 2], tag=tag if self.tagged else 0)
        self.outbox.append((work, tensor))
        if len(self.outbox) > 64:
            self.outbox = [(w, t) for w, t in self.outbox if not w.is_completed()]

    def receive(self, num_bytes: int, source: int, tag: int) -> Pending:
        """Post a receive at once; ``wait`` blocks until it is there."""
        return self._receive(torch.empty(num_bytes, dtype=torch.uint8, device=self.device), source, tag)

    def _receive(self, like: Tensor, source: int, tag: int) -> Pending:
        work = dist.irecv(like, source, group=self.lanes[tag % 2], tag=tag if self.tagged else 0)
        assert work is not None
        return _from_work(work, lambda: like)

    def all_reduce(self, flat: Tensor, group: Group) -> Pending:
        """Start the backend's all-reduce."""
        work = dist.all_reduce(flat, group=self.groups[group, "first"], async_op=True)
        return _from_work(work, lambda: flat)

    def all_to_all(self, sent: Tensor, lengths: list[int], got: Tensor, sizes: list[int], group: Group) -> Pending:
        """Start an all-to-all with uneven parts."""
        work = dist.all_to_all_single(got, sent, sizes, lengths, group=self.groups[group, "first"], async_op=True)
        return _from_work(work, lambda: list(torch.split(got, sizes)), sent)

    def all_gather_row(self, mine: Tensor, total: Tensor, group: Group) -> Pending:
        """Start an all-gather of rows into one."""
        work = _all_gather_row(total, mine, group=self.groups[group, "second"], async_op=True)
        return _from_work(work, lambda: total, mine)

    def all_gather(self, tensor: Tensor, group: Group) -> Pending:
        """Start an all-gather of equal shapes; a small one as messages, which start and arrive sooner."""
        if self.tagged and len(group) <= FEW_MEMBERS and tensor.numel() * tensor.element_size() <= FEW_BYTES:
            return self._tell(tensor.contiguous(), group)
        parts = [torch.empty_like(tensor) for _ in group]
        work = dist.all_gather(parts, tensor, group=self.groups[group, "second"], async_op=True)
        return _from_work(work, lambda: parts, tensor)

    def _tell(self, tensor: Tensor, group: Group) -> Pending:
        tag = TELL_TAG + 2 * list(self.groups).index((group, "first"))
        parts = {m: tensor if m == self.rank else torch.empty_like(tensor) for m in group}
        others = [m for m in group if m != self.rank]
        waits = [self._receive(parts[m], m, tag) for m in others]
        for m in others:
            self.send(tensor, m, tag)

        def wait() -> list[Tensor]:
            for each in waits:
                each.wait()
            return list(parts.values())

        return Pending(lambda: True, wait)

    def tell(self, row: Sequence[float], group: Group) -> Pending:
        """Start an all-gather of the rows."""
        if len(group) == 1:
            return done([tuple(row)])
        pending = self.all_gather(torch.tensor(row, dtype=torch.float64).to(self.device), group)
        return Pending(pending.ready, lambda: [tuple(part.tolist()) for part in pending.wait()])

    def all_gather_object(self, value: Any, group: Group) -> Pending:
        """Exchange pickled values: first their lengths, then their bytes."""
        if len(group) == 1:
            return done([value])
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        small = self.groups[group, "small"]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in group]
        dist.all_gather(sizes, torch.tensor([data.numel()], device=self.device), group=small)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in group]
        dist.all_gather(parts, padded, group=small)
        return done([pickle.loads(bytes(p[: int(s)].cpu().numpy())) for p, s in zip(parts, sizes, strict=True)])

    def neighbours(self, group: Group) -> list[Group]:
        """Take each rank to be alone."""
        return [(member,) for member in group]

    def share(self, num_bytes: int, group: Group) -> Pending:
        """Share no memory."""
        return done(None)

    def meet(self, group: Group) -> Pending:
        """Start a barrier."""
        if len(group) == 1:
            return done(None)
        work = dist.barrier(group=self.groups[group, "small"], async_op=True)
        return _from_work(work, lambda: None)

    def flush(self) -> None:
        """Wait until everything sent is gone."""
        for work, _ in self.outbox:
            work.wait()
        self.outbox.clear()


_all_gather_row = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


def _from_work(work: Any, value: Callable[[], Any], *keep: Any) -> Pending:
    def wait() -> Any:
        work.wait()
        _ = keep
        return value()

    return Pending(lambda: True, wait)


class Mailroom:
    """Hold what ranks in one process have sent each other.

    ``per_host``: so many ranks in a row can share memory with one another (None: all, 1: none).
    """

    def __init__(self, *, per_host: int | None = None) -> None:
        self.per_host = per_host
        self.letters: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        self.rounds: dict[tuple[Group, str, int], dict[int, Any]] = defaultdict(dict)


class MemoryTransport:
    """Reach the other ranks of the same process through a shared :class:`Mailroom`."""

    def __init__(self, rank: int, room: Mailroom) -> None:
        self.rank = rank
        self.room = room
        self.note = ""
        self.counts: dict[tuple[Group, str], int] = defaultdict(int)

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Leave a copy for ``to``."""
        self.room.letters[self.rank, to, tag].append(tensor.detach().clone())

    def receive(self, num_bytes: int, source: int, tag: int) -> Pending:
        """Take a copy that ``source`` left."""
        box = self.room.letters[source, self.rank, tag]

        def wait() -> Tensor:
            flat = box.pop(0).reshape(-1).view(torch.uint8)
            assert flat.numel() == num_bytes
            return flat

        return Pending(lambda: bool(box), wait)

    def _round(self, value: Any, group: Group, use: str, finish: Callable[[dict[int, Any]], Any]) -> Pending:
        number = self.counts[group, use]
        self.counts[group, use] += 1
        table = self.room.rounds[group, use, number]
        table[self.rank] = value
        return Pending(lambda: len(table) == len(group), lambda: finish(table))

    def all_reduce(self, flat: Tensor, group: Group) -> Pending:
        """Add up over the group in rank order."""

        def finish(table: dict[int, Tensor]) -> Tensor:
            total = table[group[0]].clone()
            for member in group[1:]:
                total += table[member]
            return flat.copy_(total)

        return self._round(flat.clone(), group, "all_reduce", finish)

    def all_to_all(self, sent: Tensor, lengths: list[int], got: Tensor, sizes: list[int], group: Group) -> Pending:
        """Give the j-th part to member j."""
        me = group.index(self.rank)
        parts = torch.split(got, sizes)

        def finish(table: dict[int, Any]) -> list[Tensor]:
            return [part.copy_(table[m][me]) for part, m in zip(parts, group, strict=True)]

        return self._round([p.clone() for p in torch.split(sent, lengths)], group, "all_to_all", finish)

    def all_gather_row(self, mine: Tensor, total: Tensor, group: Group) -> Pending:
        """Fill ``total`` with every member's row."""

        def finish(table: dict[int, Any]) -> Tensor:
            return torch.cat([table[m] for m in group], out=total)

        return self._round(mine.clone(), group, "all_gather_row", finish)

    def all_gather(self, tensor: Tensor, group: Group) -> Pending:
        """List every member's tensor."""
        return self._round(tensor.clone(), group, "all_gather", lambda table: [table[m].clone() for m in group])

    def tell(self, row: Sequence[float], group: Group) -> Pending:
        """List every member's row."""
        return self._round(tuple(row), group, "tell", lambda table: [table[m] for m in group])

    def all_gather_object(self, value: Any, group: Group) -> Pending:
        """List every member's value, each through pickle as between processes."""
        data = pickle.dumps(value)
        return self._round(data, group, "object", lambda table: [pickle.loads(table[m]) for m in group])

    def neighbours(self, group: Group) -> list[Group]:
        """Part a group by the hosts that the mailroom pretends."""
        size = self.room.per_host
        if size is None:
            return [group]
        return [tuple(part) for _, part in itertools.groupby(group, key=lambda member: member // size)]

    def share(self, num_bytes: int, group: Group) -> Pending:
        """Map one segment for all members, each its own map of it."""
        first = Segment.create(num_bytes) if self.rank == group[0] else None

        def finish(table: dict[int, Any]) -> Segment:
            made: Segment = table[group[0]]
            return made if first is not None else Segment.attach(made.address)

        return self._round(first, group, "share", finish)

    def meet(self, group: Group) -> Pending:
        """Wait for every member."""
        return self._round(None, group, "meet", lambda table: None)

    def flush(self) -> None:
        """Have nothing to wait for."""
