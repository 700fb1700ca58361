"""Rows of tensors in shared memory: the parameters of a replica group, and every member's partial gradients.

::

    parameters   | p0 |p1|   p2   |.             one row; all members read it, each updates its share of it
    gradients    | p0 |p1|   p2   |.| p0 |       a row for each member and each of its nodes of the tree;
                 | p0 |p1|   p2   |.| p0 |       behind the parameters their further sites (tied weights)

Offsets are in bytes. Dots are padding: every tensor begins on a whole cache line, every row on a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .flats import ALIGNMENT, shaped
from .segment import PAGE, PrivateView, Segment

NOWHERE = -1  # the offset of what has no place in a row (a frozen parameter has no gradient)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Place tensors in a row: ``offsets[k]`` is where the k-th begins; ``num_bytes`` is the whole row."""

    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], start: int = 0) -> RowLayout:
        """Place tensors one after another from byte ``start`` on."""
        offsets, at = [], start
        for tensor in tensors:
            offsets.append(at)
            at += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(offsets=tuple(offsets), num_bytes=-(-at // PAGE) * PAGE)

    def share(self, member: int, members: int) -> tuple[int, int]:
        """Give the bytes that one of ``members`` adds up and updates: whole pages, of about the same number."""
        pages = self.num_bytes // PAGE
        return member * pages // members * PAGE, (member + 1) * pages // members * PAGE


def view_like(row: Tensor, offset: int, like: Tensor) -> Tensor:
    """View a part of a row (uint8) in the dtype, shape and strides of ``like``."""
    return shaped(row[offset : offset + like.numel() * like.element_size()].view(like.dtype), like)


class SharedParameters:
    """Hold the parameters of a replica group in one place. Every member makes it with equal parameters.

    ``row`` is the memory that all members see; the parameters themselves become copy-on-write views of it, so that
    what a member's own code writes to them stays with that member until the next update.
    """

    def __init__(self, segment: Segment, parameters: Sequence[Tensor], layout: RowLayout) -> None:
        self.parameters, self.layout = list(parameters), layout
        self.row = segment.bytes[: layout.num_bytes]
        self.private = PrivateView(segment, 0, layout.num_bytes)
        self.views = [view_like(self.private.bytes, o, p) for o, p in zip(layout.offsets, parameters, strict=True)]
        self.places = [view.data_ptr() for view in self.views]

    def publish(self) -> None:
        """Write the parameters' values to the row. One member calls it, before any calls :meth:`adopt`."""
        for offset, parameter in zip(self.layout.offsets, self.parameters, strict=True):
            view_like(self.row, offset, parameter).copy_(parameter.detach())

    def adopt(self) -> None:
        """Let the parameters lie in the row from now on."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.data = view

    def changed(self) -> list[tuple[int, int]]:
        """List the ranges of bytes of the row that this member's own code has written to (or put elsewhere)."""
        for view, place, parameter in zip(self.views, self.places, self.parameters, strict=True):
            if parameter.data_ptr() != place:
                view.copy_(parameter.detach())
                parameter.data = view
        return self.private.changed()

    def take_over(self, changed: Sequence[tuple[int, int]], share: tuple[int, int]) -> None:
        """Put own changes inside ``share`` in the row. No member may be reading the row meanwhile."""
        for start, stop in changed:
            low, high = max(start, share[0]), min(stop, share[1])
            if low < high:
                self.row[low:high].copy_(self.private.bytes[low:high])

    def forget(self, changed: list[tuple[int, int]]) -> None:
        """See the row again where own changes were: they are in it, or those of the member that updates it."""
        if changed:
            self.private.forget(changed)

    def mark_updated(self) -> None:
        """Tell autograd that the parameters have other values now."""
        torch.autograd.graph.increment_version(self.parameters)
