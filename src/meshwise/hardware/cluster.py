"""Devices and the links between them, as values; each fact with its source.

::

    2x8xH100    node 0   [0 1 2 3 4 5 6 7]     levels[0]: 8 devices on NVLink
                node 1   [8 9 . . . . . 15]    levels[1]: 2 nodes on the network

A cluster measured here (``probe``) holds tables of measured seconds, which count before any formula.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Device:
    """State one device.

    ``peak_flops``: FLOP/s of matrix products by dtype ("fp32", "tf32", "fp16", "bf16", "fp8"), as the vendor states
    them (measured ones for this machine). ``reachable``: the share of it that large products reach in practice.
    ``bytes_per_second``: memory bandwidth. ``memory_bytes``: what a rank may use. ``launch_seconds``: the floor of one
    kernel. ``multiprocessors``: how many parts of a product run at once (0: not known); ``attention``: the share of the
    peak that fused attention reaches (0: not known). ``sources`` names for each field where its figure comes from.
    """

    name: str
    kind: str  # "cpu" or "gpu"
    memory_bytes: float
    peak_flops: Mapping[str, float]
    reachable: float
    bytes_per_second: float
    launch_seconds: float = 5e-6
    multiprocessors: int = 0
    attention: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Link:
    """State what connects the members of one level: a message of S bytes takes ``latency + S / bandwidth``.

    ``bytes_per_second`` is one direction for each device, and already what is reachable, not the line rate.
    """

    name: str
    latency_seconds: float
    bytes_per_second: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Level:
    """State that ``size`` members (devices, or groups of the level below) are joined by ``link``."""

    size: int
    link: Link


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Hold measured seconds of one operation in one group, by bytes of its message, smallest first.

    ``kind``: "message" (one way), "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", or
    "exchange": the exact reduction of gradients between replicas of this host. ``group`` is the number of ranks.
    """

    kind: str
    group: int
    points: tuple[tuple[float, float], ...]  # (bytes, seconds)

    def seconds(self, num_bytes: float) -> float:
        """Read the table: linear between points, from the smallest point down its time, beyond the last its rate."""
        points = self.points
        if num_bytes <= points[0][0]:
            return points[0][1]
        for (low, early), (high, late) in itertools.pairwise(points):
            if num_bytes <= high:
                return early + (late - early) * (num_bytes - low) / (high - low)
        return points[-1][1] * num_bytes / points[-1][0]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """State the devices a job may run on: all of one kind, joined in levels, innermost first.

    ``overlap_slowdown``: by how much computing slows down while communication runs beside it (1.0: not at all).
    ``is_here``: the cluster is this machine, so units can be timed on it.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    overlap_slowdown: float = 1.0
    measured: tuple[Measured, ...] = ()
    is_here: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """Count the devices."""
        return math.prod(level.size for level in self.levels)

    def table(self, kind: str, group: int) -> Measured | None:
        """Give the measured table of an operation in a group of that size, if there is one."""
        return next((m for m in self.measured if m.kind == kind and m.group == group), None)
