"""The exact reduction in shared memory: each rank adds up its share of all gradients of its host where they lie.

::

    member 0   |  node (0,2)      |        member 0 adds up the left half of both rows, member 1 the right half,
    member 1   |  node (2,4)      |        in tree order and in place: the first row then holds the sums

Where replicas are on several hosts, those in the same place on each finish their share with one another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..grid import Range, TreeStack, fold_node, tree_cover, tree_fold
from .flats import ALIGNMENT
from .hosts import counterparts
from .reduce import Bucket, Grads, add_grads, sum_shares
from .rows import NOWHERE, RowLayout, view_like
from .segment import Segment
from .transport import Group, Transport, wait_for

T = TypeVar("T")

NOTHING = -0.0  # the number that changes nothing when added


@dataclass(frozen=True, kw_only=True)
class Store:
    """Hold the memory of the rows: so many a member, of so many bytes; and of the flags, so many a member."""

    segment: Segment
    rows: int
    row_bytes: int
    flags: int

    def row(self, member: int, number: int) -> Tensor:
        """View a row (uint8)."""
        at = (member * self.rows + number) * self.row_bytes
        return self.segment.bytes[at : at + self.row_bytes]

    def flags_of(self, members: int) -> Tensor:
        """View the members' flags, a row each."""
        return self.segment.bytes[members * self.rows * self.row_bytes :].view(members, self.flags)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Name the replicas that share memory with one rank, and those in its place on the other hosts.

    Every host has as many, in a row: ``group`` is all of them, ``here`` those of this host, ``across`` one a host.
    """

    group: Group
    here: Group
    across: Group

    @classmethod
    def of(cls, transport: Transport, group: Group) -> Reach | None:
        """Find them; None where the hosts have unlike numbers of replicas, or one each."""
        parts = transport.neighbours(group)
        columns = counterparts(parts)
        if len(columns) < 2 or sum(parts, ()) != group:
            return None
        here = next(part for part in parts if transport.rank in part)
        return cls(group=group, here=here, across=columns[here.index(transport.rank)])

    def hosts(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Part what there is one of for each replica by host."""
        size = len(self.here)
        return [items[k : k + size] for k in range(0, len(items), size)]


class SharedReducer:
    """Reduce the gradients of one rank's sites over its replicas.

    ``layout`` places each site (parameters' first sites, then further ones) in a row of gradients. Gradients are
    dense. Every rank of the group makes the same calls.
    """

    def __init__(
        self,
        transport: Transport,
        reach: Reach,
        buckets: Sequence[Sequence[int]],
        layout: RowLayout,
        *,
        exact: bool,
        store: Store | None = None,
    ) -> None:
        self.transport, self.reach, self.layout, self.exact = transport, reach, layout, exact
        self.buckets = [Bucket(sites=tuple(b)) for b in buckets]
        self.group, self.me = reach.here, reach.here.index(transport.rank)
        self.host = reach.across.index(transport.rank)
        self.num_bytes = 0
        self.store = store  # of the reducer before: kept where it is large enough
        self.total, self.ranges = 0, ()  # type: int, Sequence[Range]

    # ---- a step ----------------------------------------------------------------------------------------

    def prepare(self, total: int, ranges: Sequence[Range]) -> Generator[None, None, bool]:
        """Share rows enough for a step of ``total`` slots; False where the memory cannot be had."""
        if (total, ranges) == (self.total, self.ranges):
            return True
        covers = [tree_cover(total, *r) if self.exact else ((r,) if r[0] < r[1] else ()) for r in ranges]
        yield from self._make_room(max(map(len, covers)))
        if self.store is None:
            return False
        self.total, self.ranges = total, ranges
        self.covers = self.reach.hosts(covers)[self.host]
        spans = [_span(part) for part in self.reach.hosts(ranges)]
        self.nodes = [tree_cover(total, *s) if self.exact else ((s,) if s[0] < s[1] else ()) for s in spans]
        self._lay_out()
        return True

    def _make_room(self, rows: int) -> Generator[None, None, None]:
        old, size, flags = self.store, self.layout.num_bytes, len(self.layout.offsets)
        if old is not None:
            if rows <= old.rows and size <= old.row_bytes and flags <= old.flags:
                return
            rows, size, flags = max(rows, old.rows), max(size, old.row_bytes), max(flags, old.flags)
        segment = yield from wait_for(self.transport.share(len(self.group) * (rows * size + flags), self.group))
        self.store = None if segment is None else Store(segment=segment, rows=rows, row_bytes=size, flags=flags)

    def _lay_out(self) -> None:
        """Find where each node of the tree has its row, and which of them begins with which slot here."""
        store = self.store
        assert store is not None
        self.rows: dict[Range, Tensor] = {}
        for member, cover in enumerate(self.covers):
            self.rows |= {node: store.row(member, k) for k, node in enumerate(cover)}
        self.flags = store.flags_of(len(self.group))[:, : len(self.layout.offsets)]
        self.own = {node[0]: node for node in self.covers[self.me]}  # by first slot
        self.stack = TreeStack(self.total, *self.reach.hosts(self.ranges)[self.host][self.me])
        self.views: dict[tuple[int, Range], Grads] = {}
        self.parts: dict[tuple[int, int, torch.dtype], dict[Range, Tensor]] = {}  # pieces of all rows
        self.aims: dict[tuple[int, int, int], Grads] = {}  # the same by segment of a stage, kept by whoever asks

    def begin(
        self, total: int, ranges: Sequence[Range], *, presence_known: bool, likes: Sequence[Tensor]
    ) -> None:
        """Start the step that :meth:`prepare` made room for. ``likes[site]`` is a site's parameter."""
        assert (total, ranges) == (self.total, self.ranges)
        self.likes, self.presence_known = likes, presence_known
        self.present = [False] * len(likes)
        for bucket in self.buckets:
            bucket.nodes, bucket.launched, bucket.settled = {}, False, None

    def begins(self, slot: int) -> bool:
        """Tell whether a slot is the first of one of this rank's own nodes."""
        return slot in self.own

    def place(self, index: int, slot: int) -> Grads | None:
        """Give where the gradients of a bucket's sites belong, if ``slot`` is the first of one of the own nodes.

        What has no place (None) is frozen.
        """
        node = self.own.get(slot)
        if node is None:
            return None
        key = (index, node)
        if key not in self.views:
            self.views[key] = [self._view(self.rows[node], site) for site in self.buckets[index].sites]
        return self.views[key]

    def _view(self, row: Tensor, site: int) -> Tensor | None:
        offset = self.layout.offsets[site]
        return None if offset == NOWHERE else view_like(row, offset, self.likes[site])

    def push(self, index: int, slot: int, grads: Grads) -> None:
        """Hand over the gradients of one slot for a bucket (they are changed in place from now on)."""
        bucket = self.buckets[index]
        places = self.place(index, slot)
        if places is not None:
            grads = bucket.settled = _settle(places, grads)
        if self.exact:
            self.stack.push(bucket.nodes, slot, grads, add_grads)
        else:
            (mine,) = self.covers[self.me]
            bucket.nodes[mine] = add_grads(bucket.nodes[mine], grads) if bucket.nodes else grads

    def launch(self, index: int) -> None:
        """Put the last of a bucket's partial sums in its place, all slots being pushed."""
        bucket = self.buckets[index]
        bucket.launched = True
        nodes = list(bucket.nodes.values())
        for k, site in enumerate(bucket.sites):
            self.present[site] = any(grads[k] is not None for grads in nodes)
        for node, grads in bucket.nodes.items():
            places = self.place(index, node[0])
            assert places is not None
            if grads is not bucket.settled:
                _settle(places, grads)
            if any(grad is None for grad in grads):
                self._neutralize(bucket, places, grads)
        if not self.presence_known:
            for site in bucket.sites:
                self.flags[self.me, site] = self.present[site]
        bucket.nodes = {}

    def _neutralize(self, bucket: Bucket, places: Grads, grads: Grads) -> None:
        """Let places without a gradient change nothing, where another node may have one."""
        for site, place, grad in zip(bucket.sites, places, grads, strict=True):
            if grad is None and place is not None and (self.present[site] or not self.presence_known):
                place.fill_(NOTHING)

    def launch_rest(self) -> None:
        """Launch what no slot has launched: a replica without a microbatch says so."""
        for index, bucket in enumerate(self.buckets):
            if not bucket.launched:
                self.launch(index)

    # ---- after all members' launches ---------------------------------------------------------------------

    @property
    def sums(self) -> Tensor:
        """Give the row that holds the sums once every member has folded its share."""
        assert self.store is not None
        return self.store.row(self._first, 0)

    @property
    def place_of_sums(self) -> tuple[Segment, int]:
        """Give the segment in which that row is, and the byte at which it begins."""
        assert self.store is not None
        return self.store.segment, self._first * self.store.rows * self.store.row_bytes

    @property
    def _first(self) -> int:
        """Give the first member of this host that has a slot."""
        return next((k for k, cover in enumerate(self.covers) if cover), 0)

    def presence(self) -> Generator[None, None, Sequence[bool]]:
        """Tell for each site whether any replica has brought a gradient (all must have launched)."""
        if self.presence_known:
            return self.present
        found = self.flags.any(0)
        if len(self.reach.across) > 1:
            hosts = yield from wait_for(self.transport.all_gather(found, self.reach.across))
            found = torch.stack(hosts).any(0)
        return found.tolist()

    def fold(self, start: int, stop: int, dtype: torch.dtype) -> Generator[None, None, Tensor]:
        """Add up bytes ``start .. stop-1`` of all nodes in tree order; give the sums, a flat tensor of ``dtype``."""
        key = (start, stop, dtype)
        if key not in self.parts:
            self.parts[key] = {node: row[start:stop].view(dtype) for node, row in self.rows.items()}
        parts = self.parts[key]
        if len(self.reach.across) > 1:
            return (yield from self._fold_across(parts, self.sums[start:stop].view(dtype)))
        return tree_fold(self.total, parts, _add) if self.exact else _add_up(list(parts.values()))

    def _fold_across(self, parts: dict[Range, Tensor], sums: Tensor) -> Generator[None, None, Tensor]:
        """Add up what this host has, and then the hosts' nodes with those in the same place on the other hosts."""
        across = self.reach.across
        if not self.exact:
            total = _add_up(list(parts.values())) if parts else sums.fill_(NOTHING)
            yield from wait_for(self.transport.all_reduce(total, across))
            return total
        own = [fold_node(node, parts, _add) for node in self.nodes[self.host]]
        step = ALIGNMENT // sums.element_size() * len(across)
        length = -(-sums.numel() // step) * step
        sent = sums.new_full((len(across), len(own), length // len(across)), NOTHING)
        for k, node in enumerate(own):
            padded = sums.new_full((length,), NOTHING)
            padded[: node.numel()] = node
            sent[:, k] = padded.view(len(across), -1)
        got = sums.new_empty(sum(map(len, self.nodes)) * sent.shape[2])
        row = sums.new_empty(length)
        yield from sum_shares(self.transport, across, self.total, self.nodes, sent, got, row)
        return sums.copy_(row[: sums.numel()])


def _span(ranges: Sequence[Range]) -> Range:
    """Give the range from the first slot to the last of ranges in a row, some of them maybe empty."""
    held = [r for r in ranges if r[0] < r[1]]
    return (held[0][0], held[-1][1]) if held else (0, 0)



def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def _add_up(parts: list[Tensor], add: Callable[[Tensor, Tensor], Tensor] = _add) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total


def _settle(places: Grads, grads: Grads) -> Grads:
    """Copy gradients to their places, those that are not there already; give the places."""
    into, found = [], []
    for place, grad in zip(places, grads, strict=True):
        if grad is None:
            continue
        assert place is not None
        if grad.data_ptr() != place.data_ptr():
            into.append(place)
            found.append(grad)
    if into:
        torch._foreach_copy_(into, found)
    return [None if grad is None else place for place, grad in zip(places, grads, strict=True)]
