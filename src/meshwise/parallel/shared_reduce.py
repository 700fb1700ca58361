"""The exact reduction in shared memory: each member adds up its share of all members' gradients where they lie.

::

    member 0   |  node (0,2)      |        member 0 adds up the left half of both rows, member 1 the right half,
    member 1   |  node (2,4)      |        in tree order and in place: the first row then holds the sums
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..grid import Range, TreeStack, tree_cover, tree_fold
from .reduce import Bucket, Grads, add_grads
from .rows import NOWHERE, RowLayout, view_like
from .segment import Segment
from .transport import Group, Transport

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


class SharedReducer:
    """Reduce the gradients of one rank's sites with the other replicas of its host.

    ``layout`` places each site (parameters' first sites, then further ones) in a row of gradients. Gradients are
    dense. Every rank of the group makes the same calls.
    """

    def __init__(
        self,
        transport: Transport,
        group: Group,
        buckets: Sequence[Sequence[int]],
        layout: RowLayout,
        *,
        exact: bool,
        store: Store | None = None,
    ) -> None:
        self.transport, self.group, self.layout, self.exact = transport, group, layout, exact
        self.buckets = [Bucket(sites=tuple(b)) for b in buckets]
        self.me = group.index(transport.rank)
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
        self.total, self.ranges, self.covers = total, ranges, covers
        self._lay_out()
        return True

    def _make_room(self, rows: int) -> Generator[None, None, None]:
        old, size, flags = self.store, self.layout.num_bytes, len(self.layout.offsets)
        if old is not None:
            if rows <= old.rows and size <= old.row_bytes and flags <= old.flags:
                return
            rows, size, flags = max(rows, old.rows), max(size, old.row_bytes), max(flags, old.flags)
        pending = self.transport.share(len(self.group) * (rows * size + flags), self.group)
        while not pending.ready():
            yield
        segment = pending.wait()
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
        self.stack = TreeStack(self.total, *self.ranges[self.me])
        self.views: dict[tuple[int, Range], Grads] = {}
        self.aims: dict[tuple[int, int, int], Grads] = {}  # the same by segment of a stage, kept by whoever asks

    def begin(
        self, total: int, ranges: Sequence[Range], *, presence_known: bool, likes: Sequence[Tensor]
    ) -> None:
        """Start the step that :meth:`prepare` made room for. ``likes[site]`` is a site's parameter."""
        assert (total, ranges) == (self.total, self.ranges)
        self.likes, self.presence_known = likes, presence_known
        self.present = [False] * len(likes)
        for bucket in self.buckets:
            bucket.nodes, bucket.launched = {}, False

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
            grads = _settle(places, grads)
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
        return self.rows[next(cover[0] for cover in self.covers if cover)]

    def presence(self) -> Sequence[bool]:
        """Tell for each site whether any member has brought a gradient (all must have launched)."""
        return self.present if self.presence_known else self.flags.any(0).tolist()

    def fold(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Add up bytes ``start .. stop-1`` of all nodes in tree order; give the sums, a flat tensor of ``dtype``."""
        parts = {node: row[start:stop].view(dtype) for node, row in self.rows.items()}
        return tree_fold(self.total, parts, _add) if self.exact else _add_up(list(parts.values()))


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
