"""The step grid in plain numbers: microbatches, slots and the reduction tree.

::

    microbatch   0   1   2   3   4   5     six leaves; the tree is fixed by their number alone
                 |    \\ /    |    \\ /
                 |   (1,3)   |   (4,6)     two replicas hold [0,3) and [3,6), one node each;
                  \\   /       \\   /        three hold two leaves each: the second sends 2 and 3
                  (0,3)       (3,6)
                       \\     /
                        (0,6)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from .errors import JobError

T = TypeVar("T")
Range = tuple[int, int]
DEFAULT_MICROBATCHES = 8
DEFAULT_SLOTS = 8


def default_microbatch_size(batch_size: int) -> int:
    """Give the documented default: the smallest size that makes at most 8 microbatches of a batch."""
    return max(1, -(-batch_size // DEFAULT_MICROBATCHES))


def microbatch_sizes(num_samples: int, size: int | Sequence[int]) -> tuple[int, ...]:
    """Split ``num_samples`` samples in microbatches of ``size`` (or of the listed sizes, in order).

    The last one is smaller where the samples run out; a list that ends too early repeats from its start.
    """
    pattern = [size] if isinstance(size, int) else list(size)
    if not pattern or any(n < 1 for n in pattern):
        raise JobError(
            f"microbatch_size={size!r}: every microbatch needs at least 1 sample; give a positive int or list."
        )
    sizes: list[int] = []
    left = num_samples
    while left > 0:
        sizes.append(min(left, pattern[len(sizes) % len(pattern)]))
        left -= sizes[-1]
    return tuple(sizes)


def split_evenly(count: int, parts: int) -> tuple[Range, ...]:
    """Split ``range(count)`` in ``parts`` contiguous ranges whose lengths differ by at most one."""
    return tuple((i * count // parts, (i + 1) * count // parts) for i in range(parts))


def slot_ranges(num_microbatches: int, slots: int) -> tuple[Range, ...]:
    """Group microbatches in at most ``slots`` contiguous slots, the leaves of the reduction tree."""
    return split_evenly(num_microbatches, min(slots, num_microbatches))


def tree_split(low: int, high: int) -> int:
    """Say where the tree over ``[low, high)`` parts: in the middle, as replicas part a step.

    So 2 and 4 replicas always hold one whole node each, whatever the number of leaves.
    """
    return low + (high - low) // 2


def tree_cover(total: int, low: int, high: int) -> tuple[Range, ...]:
    """List the maximal nodes of the tree over ``total`` leaves that lie inside ``[low, high)``, in order."""
    return tuple(_cover((0, total), low, high)) if low < high else ()


def _cover(node: Range, low: int, high: int) -> list[Range]:
    lo, hi = node
    if hi <= low or lo >= high:
        return []
    if low <= lo and hi <= high:
        return [node]
    middle = tree_split(lo, hi)
    return _cover((lo, middle), low, high) + _cover((middle, hi), low, high)


def tree_fold(total: int, nodes: Mapping[Range, T], add: Callable[[T, T], T]) -> T:
    """Add up nodes that cover ``range(total)`` in the order of the tree: left plus right."""
    return fold_node((0, total), nodes, add)


def fold_node(node: Range, nodes: Mapping[Range, T], add: Callable[[T, T], T]) -> T:
    """Add up the nodes below one node.

    No closure calls itself here: such a cycle would keep ``nodes`` until the collector runs.
    """
    if node in nodes:
        return nodes[node]
    middle = tree_split(*node)
    return add(fold_node((node[0], middle), nodes, add), fold_node((middle, node[1]), nodes, add))


class TreeStack:
    """Reduce the leaves ``[low, high)`` of a tree as they arrive in order, keeping only maximal nodes."""

    def __init__(self, total: int, low: int, high: int) -> None:
        self.cover = set(tree_cover(total, low, high))
        self.total = total
        self.parents: dict[Range, tuple[Range, Range]] = {}
        self._learn(0, total)

    def _learn(self, lo: int, hi: int) -> None:
        if hi - lo > 1:
            middle = tree_split(lo, hi)
            self.parents[lo, middle] = self.parents[middle, hi] = ((lo, middle), (middle, hi))
            self._learn(lo, middle)
            self._learn(middle, hi)

    def push(self, nodes: dict[Range, T], leaf: int, value: T, add: Callable[[T, T], T]) -> None:
        """Put one leaf into ``nodes`` and add up every pair that is now complete."""
        here: Range = (leaf, leaf + 1)
        nodes[here] = value
        while here not in self.cover and here in self.parents:
            left, right = self.parents[here]
            if left not in nodes or right not in nodes:
                return
            here = (left[0], right[1])
            nodes[here] = add(nodes.pop(left), nodes.pop(right))
