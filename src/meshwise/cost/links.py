"""Seconds of messages and collectives on a cluster's links (draft: being written)."""

from __future__ import annotations

from ..hardware.cluster import Cluster


def message_seconds(cluster: Cluster, num_bytes: float, *, distance: int) -> float:
    """Price one message between ranks whose numbers differ by ``distance``."""
    level = cluster.levels[0] if distance < cluster.levels[0].size or len(cluster.levels) == 1 else cluster.levels[1]
    return level.link.latency_seconds + num_bytes / level.link.bytes_per_second


def collective_seconds(cluster: Cluster, kind: str, num_bytes: float, *, size: int, stride: int = 1) -> float:
    """Price one collective."""
    level = (
        cluster.levels[0] if size * stride <= cluster.levels[0].size or len(cluster.levels) == 1 else cluster.levels[1]
    )
    factor = 2 if kind == "all-reduce" else 1
    return factor * (
        (size - 1) * level.link.latency_seconds + (size - 1) / size * num_bytes / level.link.bytes_per_second
    )
