"""Seconds of messages and collectives on a cluster's links: latency and bandwidth by level, hierarchical across nodes.

::

    group of 16, neighbours in nodes of 8         S bytes on every member
    inside a node   reduce-scatter S              7 hops,  7/8 S
    between nodes   all-reduce of the S/8 share   2 hops,  2 * 1/2 S/8
    inside a node   all-gather S                  7 hops,  7/8 S

Rings: (n-1) hops and (n-1)/n of the bytes for a reduce-scatter or an all-gather, twice that for an all-reduce (NCCL's
bus bandwidth). Trees take over where hops would cost more: 2 log2(n) of them (NCCL picks by size, too).
"""

from __future__ import annotations

import math

from ..hardware.cluster import Cluster, Link

ONE_WAY = ("all-gather", "reduce-scatter")
COLLECTIVE_START = 3e-5  # seconds: 40 us for two A100 of one node, less two hops (fits to 2, 4 and 8)
KINDS = ("all-reduce", *ONE_WAY, "broadcast", "all-to-all")


def message_seconds(cluster: Cluster, num_bytes: float, sender: int, receiver: int) -> float:
    """Price one message between two ranks: as measured inside a node, else by the link of the level that joins them."""
    table = cluster.table("message", 2) if is_near(cluster, sender, receiver) else None
    if table is not None and num_bytes > 0:
        return table.seconds(num_bytes)
    link = _link(cluster, sender, receiver)
    return link.latency_seconds + num_bytes / link.bytes_per_second


def is_near(cluster: Cluster, first: int, second: int) -> bool:
    """Tell whether two ranks are in one group of the innermost level."""
    size = cluster.levels[0].size
    return first // size == second // size


def _link(cluster: Cluster, first: int, second: int) -> Link:
    """Give the link of the smallest level that holds both ranks."""
    reach = 1
    for level in cluster.levels:
        reach *= level.size
        if first // reach == second // reach:
            return level.link
    return cluster.levels[-1].link


def collective_seconds(cluster: Cluster, kind: str, num_bytes: float, *, size: int, stride: int = 1) -> float:
    """Price one collective of ``size`` ranks that are ``stride`` apart, on whole tensors of ``num_bytes``.

    Raises ValueError for a kind that nothing is known about.
    """
    if kind not in KINDS:
        raise ValueError(f"nothing is known of the collective {kind!r}; known are {', '.join(KINDS)}")
    if size == 1 or num_bytes <= 0:
        return 0.0
    table = cluster.table(kind, size)
    if table is not None:
        return table.seconds(num_bytes)
    start = COLLECTIVE_START if cluster.device.kind == "gpu" else 0.0
    return start + _ringed(cluster, kind, num_bytes, *split_group(cluster, size, stride))


def _ringed(cluster: Cluster, kind: str, num_bytes: float, inside: int, outside: int) -> float:
    """Price a collective of ``inside`` members in each of ``outside`` nodes, once it has started."""
    near = cluster.levels[0].link
    if outside == 1:
        return _flat(kind, num_bytes, inside, near)
    far = cluster.levels[-1].link
    if inside == 1:
        return _flat(kind, num_bytes, outside, far)
    if kind == "all-to-all":  # what leaves the node goes over each device's own network link
        leaving = num_bytes * (outside - 1) / outside
        return (
            _flat(kind, num_bytes / outside, inside, near)
            + outside * far.latency_seconds
            + leaving / (far.bytes_per_second)
        )
    within = _flat(kind, num_bytes, inside, near)
    return within + _flat(kind, num_bytes / inside, outside, far)


def split_group(cluster: Cluster, size: int, stride: int) -> tuple[int, int]:
    """Give how many members of a group lie in one node, and on how many nodes it lies."""
    node = cluster.levels[0].size if len(cluster.levels) > 1 else cluster.num_devices
    inside = max(1, min(size, node // stride)) if stride < node else 1
    return inside, -(-size // inside)


def _flat(kind: str, num_bytes: float, count: int, link: Link) -> float:
    """Price a collective in which all members have the same link: a ring or a tree, whichever is faster."""
    if count == 1:
        return 0.0
    hop, rate = link.latency_seconds, link.bytes_per_second
    depth = math.log2(count)
    if kind == "broadcast":
        return depth * hop + num_bytes / rate
    if kind == "all-to-all":
        return (count - 1) * hop + (count - 1) / count * num_bytes / rate
    share = (count - 1) / count * num_bytes / rate
    if kind in ONE_WAY:
        return min(count - 1, 2 * depth) * hop + share
    return min(2 * (count - 1) * hop + 2 * share, 2 * depth * hop + 2 * num_bytes / rate)
