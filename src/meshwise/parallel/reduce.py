"""The exact reduction: gradients of all microbatches of a step added up in the order of one fixed tree.

Each replica reduces the whole tree nodes inside its own range of slots; the exchange finishes the tree
(all-to-all, add in tree order, all-gather: the bytes of a ring). Two replicas that hold one node each need
only a plain all-reduce, since a + b = b + a bit for bit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..grid import Range, TreeStack, tree_cover, tree_fold
from .flats import Flat
from .transport import Group, Pending, Transport

Grads = list[Tensor | None]
EXACT_ALL_REDUCE = (torch.float32, torch.float64)


def add_grads(left: Grads, right: Grads) -> Grads:
    """Add two lists of gradients entry by entry into the left one; None is nothing."""
    both = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a is not None and b is not None]
    dense = [i for i in both if not (left[i].is_sparse or right[i].is_sparse)]  # type: ignore[union-attr]
    if dense:
        mine, others = [left[i] for i in dense], [right[i] for i in dense]
        torch._foreach_add_(mine, others)  # type: ignore[arg-type]
    for i in both:
        a, b = left[i], right[i]
        assert a is not None and b is not None
        if a.is_sparse or b.is_sparse:
            left[i] = join_sparse([a, b]) if a.is_sparse and b.is_sparse else a.to_dense() + b.to_dense()
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def join_sparse(parts: Sequence[Tensor]) -> Tensor:
    """Put the entries of sparse gradients behind one another, in order, without adding them up."""
    indices = torch.cat([p._indices() for p in parts], dim=1)
    values = torch.cat([p._values() for p in parts])
    return torch.sparse_coo_tensor(indices, values, parts[0].shape, check_invariants=False)


@dataclass(kw_only=True)
class Bucket:
    """Hold the gradients of some sites through one step."""

    sites: tuple[int, ...]
    nodes: dict[Range, Grads] = field(default_factory=dict)
    pending: Any = None
    launched: bool = False
    settled: Grads | None = None  # gradients that lie where they belong (in shared memory)


class Reducer:
    """Reduce the gradients of one rank's sites over its replicas. Every rank of the group makes the same calls.

    ``exact=False`` leaves the order to the backend's all-reduce.
    """

    def __init__(self, transport: Transport, group: Group, buckets: Sequence[Sequence[int]], *, exact: bool) -> None:
        self.transport = transport
        self.group = group
        self.exact = exact
        self.buckets = [Bucket(sites=tuple(b)) for b in buckets]
        self.num_bytes = 0
        self.flats: dict[Any, Flat] = {}
        self.total, self.ranges = 0, ()  # type: tuple[int, Sequence[Range]]

    def begin(self, total: int, ranges: Sequence[Range], *, presence_known: bool, likes: Sequence[Tensor]) -> None:
        """Start a step of ``total`` slots, of which member k of the group holds ``ranges[k]``.

        ``likes[site]`` is the parameter a site belongs to. ``presence_known``: every member has a gradient
        for just the sites that every other member has one for.
        """
        self.likes, self.presence_known = likes, presence_known
        if (total, ranges) != (self.total, self.ranges):
            self._share(total, ranges)
        for bucket in self.buckets:
            bucket.nodes, bucket.pending, bucket.launched = {}, None, False

    def _share(self, total: int, ranges: Sequence[Range]) -> None:
        """Settle which nodes of the tree each member reduces; without exactness its whole range is one node."""
        self.total, self.ranges = total, ranges
        self.mine = ranges[self.group.index(self.transport.rank)]
        if self.exact:
            self.covers = [tree_cover(total, low, high) for low, high in ranges]
            self.stack = TreeStack(total, *self.mine)
        else:
            self.covers = [((low, high),) if low < high else () for low, high in ranges]

    def push(self, index: int, slot: int, grads: Grads) -> None:
        """Hand over the gradients of one slot for a bucket (they are changed in place from now on)."""
        nodes = self.buckets[index].nodes
        if self.exact:
            self.stack.push(nodes, slot, grads, add_grads)
        else:
            nodes[self.mine] = add_grads(nodes[self.mine], grads) if nodes else grads

    def launch(self, index: int) -> None:
        """Start the exchange of a bucket whose slots are all pushed; always in the order of the buckets."""
        bucket = self.buckets[index]
        bucket.launched = True
        bucket.pending = self._exchange(index, bucket) if len(self.group) > 1 else None
        if bucket.pending is not None:
            next(bucket.pending)  # run to the first wait: the exchange is now on its way

    def finish(self) -> Generator[None, None, list[Grads]]:
        """Wait for all buckets, and give of each the sum for each of its sites (None where there was none).

        Buckets take turns: while one waits for what the others added up, the next is added up here.
        """
        for index, bucket in enumerate(self.buckets):
            if not bucket.launched:  # all are on their way before anyone waits: others may have launched all
                self.launch(index)
        sums: dict[int, Grads] = {}
        while len(sums) < len(self.buckets):
            for index, bucket in enumerate(self.buckets):
                if index not in sums:
                    found = self._advance(bucket)
                    if found is not None:
                        sums[index] = found
            if len(sums) < len(self.buckets):
                yield
        return [sums[index] for index in range(len(self.buckets))]

    def _advance(self, bucket: Bucket) -> Grads | None:
        """Go on with a bucket to where it waits again, or give its sums."""
        if bucket.pending is None:
            if not bucket.nodes:
                return [None] * len(bucket.sites)
            sums = tree_fold(self.total, bucket.nodes, add_grads)
            return [g.coalesce() if g is not None and g.is_sparse else g for g in sums]
        try:
            next(bucket.pending)
        except StopIteration as stop:
            result: Grads = stop.value
            return result
        return None

    # ---- exchange ----------------------------------------------------------------------------------

    def _exchange(self, index: int, bucket: Bucket) -> Generator[None, None, Grads]:
        present = self._own_presence(bucket)
        if not self.presence_known:
            pending = self.transport.all_gather_object(present, self.group)
            members = yield from _poll(pending)
            present = [max(flags) for flags in zip(*members, strict=True)]
        result: Grads = [None] * len(bucket.sites)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for k, (site, flag) in enumerate(zip(bucket.sites, present, strict=True)):
            if flag == 1:
                by_dtype.setdefault(self.likes[site].dtype, []).append(k)
        started = [(ks, self._start(index, bucket, dtype, ks)) for dtype, ks in by_dtype.items()]
        for _, part in started:
            next(part, None)
        bucket.nodes = {  # the rest is on its way
            k: v for k, v in bucket.nodes.items() if any(g is not None and g.is_sparse for g in v)
        }
        yield
        for ks, part in started:
            views = yield from part
            for k, view in zip(ks, views, strict=True):
                result[k] = view
        for k in [k for k, flag in enumerate(present) if flag == 2]:
            result[k] = yield from self._sum_sparse(bucket, k)
        return result

    def _own_presence(self, bucket: Bucket) -> list[int]:
        flags = [0] * len(bucket.sites)
        for grads in bucket.nodes.values():
            for k, grad in enumerate(grads):
                if grad is not None:
                    flags[k] = max(flags[k], 2 if grad.is_sparse else 1)
        return flags

    def _start(
        self, index: int, bucket: Bucket, dtype: torch.dtype, ks: list[int]
    ) -> Generator[None, None, list[Tensor]]:
        flat = self._flat(index, [self.likes[bucket.sites[k]] for k in ks], dtype, tuple(ks))
        nodes = self.covers[self.group.index(self.transport.rank)]
        nothing: Grads = [None] * len(bucket.sites)
        for row in range(flat.nodes):
            grads = bucket.nodes.get(nodes[row], nothing) if nodes else nothing
            flat.fill(row, [grads[k] for k in ks])
            del grads  # else their memory could not serve the rest of the backward
        self.num_bytes += flat.sent.numel() * flat.sent.element_size()
        if self._plain(dtype):
            yield from _poll(self.transport.all_reduce(flat.total, self.group))
        else:
            yield from self._all_to_all(flat)
        return flat.views

    def _plain(self, dtype: torch.dtype) -> bool:
        one_each = len(self.group) == 2 and all(len(c) <= 1 for c in self.covers)
        return not self.exact or (one_each and dtype in EXACT_ALL_REDUCE)

    def _flat(self, index: int, likes: list[Tensor], dtype: torch.dtype, ks: tuple[int, ...]) -> Flat:
        counts = tuple(map(len, self.covers))
        key = (index, dtype, ks)
        if key not in self.flats or self.flats[key].counts != counts:
            me = self.group.index(self.transport.rank)
            self.flats[key] = Flat(likes, counts, me, one_row=self._plain(dtype))
        return self.flats[key]

    def _all_to_all(self, flat: Flat) -> Generator[None, None, None]:
        yield from sum_shares(self.transport, self.group, self.total, self.covers, flat.sent, flat.got, flat.total)

    def _sum_sparse(self, bucket: Bucket, k: int) -> Generator[None, None, Tensor]:
        own = [g[k] for _, g in sorted(bucket.nodes.items()) if g[k] is not None]
        packed = [(g._indices(), g._values()) for g in own if g is not None]
        members = yield from _poll(self.transport.all_gather_object(packed, self.group))
        shape = self.likes[bucket.sites[k]].shape
        parts = [torch.sparse_coo_tensor(i, v, shape, check_invariants=False) for m in members for i, v in m]
        return join_sparse(parts).coalesce()


def sum_shares(
    transport: Transport,
    group: Group,
    total: int,
    covers: Sequence[Sequence[Range]],
    sent: Tensor,
    got: Tensor,
    row: Tensor,
) -> Generator[None, None, None]:
    """Add up an own share of all nodes, in tree order, and tell the sum to all of ``group``: it is ``row`` in the end.

    ``covers[j]`` are the nodes of the tree over ``total`` slots that member j brings. ``sent`` holds the own ones:
    (member, node, element of that member's share); ``got`` has room for a share of all nodes.
    """
    nodes, share = sent.shape[1:]
    lengths = [nodes * share] * len(group)
    sizes = [len(cover) * share for cover in covers]
    parts = yield from _poll(transport.all_to_all(sent.view(-1), lengths, got, sizes, group))
    found: dict[Range, Tensor] = {}
    for cover, part in zip(covers, parts, strict=True):
        found.update(zip(cover, part.view(len(cover), share), strict=True))
    mine = tree_fold(total, found, lambda left, right: left.add_(right))
    yield from _poll(transport.all_gather_row(mine, row, group))


def _poll(pending: Pending) -> Generator[None, None, Any]:
    """Yield once at least, so that an exchange is started before anyone waits for it."""
    yield
    while not pending.ready():
        yield
    return pending.wait()


def make_buckets(sizes: Sequence[int], limit: int = 25 << 20, first: int = 1 << 20) -> list[list[int]]:
    """Group sites (their bytes given in backward order) in buckets, a small one first as DDP does."""
    buckets: list[list[int]] = []
    room = 0
    for site, size in enumerate(sizes):
        if not buckets or room <= 0:
            room = first if not buckets else limit
            buckets.append([])
        buckets[-1].append(site)
        room -= size
    return buckets

