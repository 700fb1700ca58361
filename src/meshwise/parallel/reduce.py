"""The exact reduction: gradients of all microbatches of a step added up in the order of one fixed tree.

Each replica reduces the whole tree nodes inside its own range of slots; the exchange finishes the tree
(all-to-all, add in tree order, all-gather: the bytes of a ring). Two replicas that hold one node each need
only a plain all-reduce, since a + b = b + a bit for bit. What is absent is -0.0, the number that changes
nothing when added.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..grid import Range, TreeStack, tree_cover, tree_fold
from .transport import Group, Pending, Transport

Grads = list[Tensor | None]
ALIGNMENT = 64
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


class Reducer:
    """Reduce the gradients of one rank's sites over its replicas. Every rank of the group makes the same calls.

    ``exact=False`` leaves the order to the backend's all-reduce.
    """

    def __init__(
        self, transport: Transport, group: Group, buckets: Sequence[Sequence[int]], *, exact: bool
    ) -> None:
        self.transport = transport
        self.group = group
        self.exact = exact
        self.buckets = [Bucket(sites=tuple(b)) for b in buckets]
        self.num_bytes = 0
        self.num_exchanges = 0
        self.flats: dict[Any, Tensor] = {}
        self.total, self.ranges = 0, ()  # type: tuple[int, Sequence[Range]]

    def begin(
        self, total: int, ranges: Sequence[Range], *, presence_known: bool, likes: Sequence[Tensor]
    ) -> None:
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
        self.num_exchanges += len(self.group) > 1
        bucket.pending = self._exchange(index, bucket) if len(self.group) > 1 else None
        if bucket.pending is not None:
            next(bucket.pending, None)  # run to the first wait: the exchange is now on its way

    def finish(self, index: int) -> Generator[None, None, Grads]:
        """Wait for a bucket and give the sum for each of its sites (None where no microbatch had one)."""
        bucket = self.buckets[index]
        if not bucket.launched:
            self.launch(index)
        if bucket.pending is None:
            if not bucket.nodes:
                return [None] * len(bucket.sites)
            return [
                g.coalesce() if g is not None and g.is_sparse else g
                for g in tree_fold(self.total, bucket.nodes, add_grads)
            ]
        result: Grads = yield from bucket.pending
        return result

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
        likes = [self.likes[bucket.sites[k]] for k in ks]
        offsets, length = _layout(likes, len(self.group))
        me = self.group.index(self.transport.rank)
        nodes = self.covers[me]
        flat = self._flat((index, dtype, tuple(ks)), max(1, len(nodes)) * length, likes[0])
        flats = flat.view(-1, length)
        for row, node in zip(flats, nodes, strict=False):
            self._fill(
                row, offsets, likes, [bucket.nodes.get(node, [None] * len(bucket.sites))[k] for k in ks]
            )
        if not nodes:
            flats = flats[:0]
        if self._plain(dtype):
            total = yield from self._all_reduce(flat if nodes else flat.fill_(-0.0))
        else:
            total = yield from self._all_to_all(flats, length)
        return [_view(total, o, like) for o, like in zip(offsets, likes, strict=True)]

    def _plain(self, dtype: torch.dtype) -> bool:
        one_each = len(self.group) == 2 and all(len(c) <= 1 for c in self.covers)
        return not self.exact or (one_each and dtype in EXACT_ALL_REDUCE)

    def _flat(self, key: Any, length: int, like: Tensor) -> Tensor:
        flat = self.flats.get(key)
        if flat is None or flat.numel() != length:
            flat = self.flats[key] = torch.full((length,), -0.0, dtype=like.dtype, device=like.device)
        return flat

    @staticmethod
    def _fill(row: Tensor, offsets: list[int], likes: list[Tensor], grads: Grads) -> None:
        views = [_view(row, o, like) for o, like in zip(offsets, likes, strict=True)]
        have = [(v, g) for v, g in zip(views, grads, strict=True) if g is not None]
        if have:
            torch._foreach_copy_([v for v, _ in have], [g for _, g in have])
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                view.fill_(-0.0)

    def _all_reduce(self, flat: Tensor) -> Generator[None, None, Tensor]:
        self.num_bytes += flat.numel() * flat.element_size()
        total: Tensor = yield from _poll(self.transport.all_reduce(flat, self.group))
        return total

    def _all_to_all(self, flats: Tensor, length: int) -> Generator[None, None, Tensor]:
        size = len(self.group)
        share = length // size
        chunks = [flats[:, j * share : (j + 1) * share].contiguous() for j in range(size)]
        sizes = [len(c) * share for c in self.covers]
        self.num_bytes += sum(c.numel() for c in chunks) * flats.element_size()
        parts = yield from _poll(self.transport.all_to_all(chunks, sizes, self.group))
        nodes: dict[Range, Tensor] = {}
        for cover, part in zip(self.covers, parts, strict=True):
            nodes.update(zip(cover, part.view(len(cover), share), strict=True))
        mine = tree_fold(self.total, nodes, lambda a, b: a + b)
        gathered = yield from _poll(self.transport.all_gather(mine.contiguous(), self.group))
        return torch.cat(gathered)

    def _sum_sparse(self, bucket: Bucket, k: int) -> Generator[None, None, Tensor]:
        own = [g[k] for _, g in sorted(bucket.nodes.items()) if g[k] is not None]
        packed = [(g._indices(), g._values()) for g in own if g is not None]
        members = yield from _poll(self.transport.all_gather_object(packed, self.group))
        shape = self.likes[bucket.sites[k]].shape
        parts = [torch.sparse_coo_tensor(i, v, shape, check_invariants=False) for m in members for i, v in m]
        return join_sparse(parts).coalesce()


def _poll(pending: Pending) -> Generator[None, None, Any]:
    """Yield once at least, so that an exchange is started before anyone waits for it."""
    yield
    while not pending.ready():
        yield
    return pending.wait()


def _layout(likes: Sequence[Tensor], members: int) -> tuple[list[int], int]:
    """Place tensors in a flat buffer, each aligned; the length is a multiple of members times the alignment."""
    step = ALIGNMENT // likes[0].element_size()
    offsets, at = [], 0
    for like in likes:
        offsets.append(at)
        at += -(-like.numel() // step) * step
    unit = step * members
    return offsets, -(-at // unit) * unit


def _view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    part = flat[offset : offset + like.numel()]
    if like.is_contiguous():
        return part.view(like.shape)
    return part.as_strided(like.shape, like.stride(), part.storage_offset())


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


Finish = Callable[[], Generator[None, None, Grads]]
