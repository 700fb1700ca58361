"""The flat memory in which the gradients of a bucket travel, laid out once and kept from step to step.

::

    all-reduce     |  p0  |p1|    p2    |.      one row; what comes back lies in the same place
    all-to-all     member 0: node 0, node 1 | member 1: node 0, node 1      to send, a share for each member
                   |  p0  |p|  |  p0  |p|     |1|    p2    | |1|    p2    |

Dots are padding: every parameter begins on a whole cache line. What is absent, padding too, is -0.0, the
number that changes nothing when added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
Piece = tuple[int, Tensor, int, int]  # which tensor, where it goes, which of its elements


class Flat:
    """Place tensors like ``likes`` (one dtype) in flat memory for a group of ``counts``' length.

    ``counts[j]`` is the number of partial sums (nodes) that member j brings, ``me`` the own place in the group.
    ``one_row``: all members add up one row in place; else each adds up its own share of every row.
    """

    def __init__(self, likes: Sequence[Tensor], counts: Sequence[int], me: int, *, one_row: bool) -> None:
        self.likes, self.counts, self.one_row = likes, tuple(counts), one_row
        offsets, length = layout(likes, len(counts))
        self.share = length // len(counts)
        like = likes[0]
        self.nodes = 1 if one_row else counts[me]
        members = 1 if one_row else len(counts)
        shape = (members, self.nodes, length // members)
        self.sent = torch.full(shape, -0.0, dtype=like.dtype, device=like.device)
        self.got = like.new_empty(0 if one_row else sum(counts) * self.share)
        self.total = self.sent.view(-1) if one_row else like.new_empty(length)
        self.views = [view_at(self.total, o, t) for o, t in zip(offsets, likes, strict=True)]
        self.pieces = [self._pieces(node, offsets) for node in range(self.nodes)]

    def _pieces(self, node: int, offsets: Sequence[int]) -> list[Piece]:
        """Cut tensors where the share of one member ends and that of the next begins."""
        width = self.sent.shape[2]
        pieces = []
        for k, (offset, like) in enumerate(zip(offsets, self.likes, strict=True)):
            at, end = offset, offset + like.numel()
            while at < end:
                member, start = divmod(at, width)
                stop = min(width, start + end - at)
                pieces.append((k, self.sent[member, node, start:stop], at - offset, at - offset + stop - start))
                at += stop - start
        return pieces

    def fill(self, node: int, grads: Sequence[Tensor | None]) -> None:
        """Put one partial sum in its place."""
        whole = [g for g in grads if g is not None]
        if self.one_row and len(whole) == len(self.views):
            torch._foreach_copy_(self.views, whole)
            return
        flat = [None if g is None else in_memory_order(g, t) for g, t in zip(grads, self.likes, strict=True)]
        into, found = [], []
        for k, place, start, stop in self.pieces[node]:
            grad = flat[k]
            if grad is None:
                place.fill_(-0.0)
            else:
                into.append(place)
                found.append(grad if stop - start == grad.numel() else grad[start:stop])
        if into:
            torch._foreach_copy_(into, found)


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """View a dense tensor as one row in the order in which ``like`` lies in memory."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def layout(likes: Sequence[Tensor], members: int) -> tuple[list[int], int]:
    """Place tensors in a row, each aligned; its length is a multiple of members times the alignment."""
    step = ALIGNMENT // likes[0].element_size()
    offsets, at = [], 0
    for like in likes:
        offsets.append(at)
        at += -(-like.numel() // step) * step
    unit = step * members
    return offsets, -(-at // unit) * unit


def view_at(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """View a part of a row in the shape and strides of ``like``."""
    return shaped(flat[offset : offset + like.numel()], like)


def shaped(part: Tensor, like: Tensor) -> Tensor:
    """View flat elements in the shape and the very strides of ``like``: kernels look at those of dims of size 1 too."""
    return part.as_strided(like.shape, like.stride(), part.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill their memory, each once, in some order of the dims."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True
