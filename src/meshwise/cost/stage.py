"""What a run of units costs as one stage: sums over units, with what only shows where units meet.

All figures are for one microbatch. ``[first, last)`` are the units of the stage::

    taken   |  saved of each unit, and what it is the first to save of its input  |  given, where no unit has saved it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .profile import CellSeconds, ParameterProfile, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPrice:
    """Hold what a unit's cell takes on one device under one tp: seconds of computing, and of tp's collectives."""

    seconds: CellSeconds
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Hold one stage: seconds of its cells, and bytes.

    ``held_bytes`` stay from the forward to the backward; ``forward_peak_bytes`` and ``backward_peak_bytes`` are the
    most that one cell adds to what is held of other microbatches. ``taken_bytes`` and ``given_bytes`` cross its
    boundaries. ``largest_bytes``: parameters of its two largest units (what ZeRO 3 has gathered at once);
    ``largest_gradient_bytes``: gradients of its largest unit.
    """

    first: int
    last: int
    seconds: CellSeconds
    tensor_forward: float
    tensor_backward: float
    held_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    taken_bytes: float
    given_bytes: float
    given_grad_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    largest_bytes: float
    largest_gradient_bytes: float
    num_units: int
    num_rows: int


class StageTable:
    """Sum the units of a profile up to any stage. ``sharded``: over how many tp ranks parameters and saved bytes go."""

    def __init__(self, profile: Profile, prices: Sequence[UnitPrice], *, tp: int = 1, sequence: bool = False) -> None:
        self.profile, self.prices, self.tp, self.sequence = profile, prices, tp, sequence
        self.units = profile.units
        self.parameters = profile.parameters
        self.names = [u.params for u in profile.units]
        self.gradients = [
            sum(self._bytes(self.parameters[n]) for n in names if n in self.parameters and self.parameters[n].trainable)
            for names in self.names
        ]
        used = {n for names in self.names for n in names}
        self.unused = [n for n in self.parameters if n not in used]
        self.saved = [self._parted(u.saved_bytes + u.saved_input_bytes, u.saved_sharded_bytes) for u in self.units]
        self.stages: dict[tuple[int, int], StageCost] = {}
        self.rows: list[tuple[int, int]] = []  # runs of units that are not cut
        self.cuts: dict[Any, tuple[int, ...]] = {}  # what the planner found for it
        self.sums: list[list[float]] = [
            list(itertools.accumulate(column, initial=0.0))
            for column in zip(*map(self._row, range(len(self.units))), strict=True)
        ]

    def _parted(self, num_bytes: float, sharded: float) -> float:
        """Divide what tp divides; sequence sharding divides the rest as well."""
        rest = num_bytes - sharded
        return sharded / self.tp + (rest / self.tp if self.sequence else rest)

    def _row(self, u: int) -> tuple[float, ...]:
        price = self.prices[u]
        s = price.seconds
        return (
            s.forward,
            s.backward,
            s.backward_input,
            s.backward_weight,
            price.tensor_forward,
            price.tensor_backward,
            self.saved[u],
        )

    def _sum(self, column: int, first: int, last: int) -> float:
        return self.sums[column][last] - self.sums[column][first]

    def seconds(self, first: int, last: int) -> float:
        """Give the seconds of forward and backward of a stage, tp's collectives included."""
        return sum(self._sum(c, first, last) for c in (0, 1, 4, 5))

    def boundary(self, unit: int) -> float:
        """Give the bytes that cross behind a unit (before unit 0: none)."""
        if unit < 0:
            return 0.0
        num_bytes = self.units[unit].boundary_bytes
        return num_bytes / self.tp if self.sequence else num_bytes

    def held(self, first: int, last: int) -> float:
        """Give what a stage keeps of one microbatch from its forward to its backward."""
        again = self.units[first].saved_input_bytes if first else 0.0  # is in what it takes
        end = self.units[last - 1].boundary_unsaved_bytes
        inside = self._sum(6, first, last) - self._parted(again, 0.0)
        return self.boundary(first - 1) + max(0.0, inside) + self._parted(end, 0.0)

    def stage(self, first: int, last: int) -> StageCost:
        """Give all figures of a stage."""
        if (first, last) not in self.stages:
            self.stages[first, last] = self._stage(first, last)
        return self.stages[first, last]

    def _stage(self, first: int, last: int) -> StageCost:
        owned = self._owned(first, last)
        forward, backward = self._peaks(first, last)
        unit_bytes = sorted((sum(self._bytes(p) for p in self._of(u)) for u in range(first, last)), reverse=True)
        grad = self.units[last - 1].boundary_grad_bytes
        return StageCost(
            first=first,
            last=last,
            seconds=CellSeconds(
                forward=self._sum(0, first, last),
                backward=self._sum(1, first, last),
                backward_input=self._sum(2, first, last),
                backward_weight=self._sum(3, first, last),
            ),
            tensor_forward=self._sum(4, first, last),
            tensor_backward=self._sum(5, first, last),
            held_bytes=self.held(first, last),
            forward_peak_bytes=forward,
            backward_peak_bytes=backward,
            taken_bytes=self.boundary(first - 1),
            given_bytes=self.boundary(last - 1) if last < len(self.units) else 0.0,
            given_grad_bytes=(grad / self.tp if self.sequence else grad) if last < len(self.units) else 0.0,
            parameter_bytes=sum(map(self._bytes, owned)),
            gradient_bytes=sum(self._bytes(p) for p in owned if p.trainable),
            optimizer_bytes=sum(p.optimizer_bytes / (self.tp if p.tp_sharded else 1) for p in owned),
            largest_bytes=sum(unit_bytes[:2]),
            largest_gradient_bytes=max(self.gradients[first:last]),
            num_units=last - first,
            num_rows=sum(self.units[u].is_row for u in range(first, last)),
        )

    def _of(self, unit: int) -> list[ParameterProfile]:
        return [self.parameters[n] for n in self.names[unit] if n in self.parameters]

    def _owned(self, first: int, last: int) -> list[ParameterProfile]:
        found = dict.fromkeys(n for u in range(first, last) for n in self.names[u] if n in self.parameters)
        if first == 0:  # what no unit uses is on every rank
            found |= dict.fromkeys(self.unused)
        return [self.parameters[n] for n in found]

    def _bytes(self, parameter: ParameterProfile) -> float:
        return parameter.num_bytes / (self.tp if parameter.tp_sharded else 1)

    def _peaks(self, first: int, last: int) -> tuple[float, float]:
        """Give the most that a forward and a backward cell of the stage have alive at once.

        Gradients of parameters are not among it: they are counted as rows of the reduction tree.
        """
        alive = self.boundary(first - 1)
        forward = backward = alive
        for u in range(first, last):
            unit = self.units[u]
            before = self.units[u - 1].boundary_unsaved_bytes if u > first else 0.0
            forward = max(
                forward,
                alive + self._parted(before, 0.0) + self._parted(unit.forward_peak_bytes, unit.saved_sharded_bytes),
            )
            alive += self.saved[u] - (self._parted(unit.saved_input_bytes, 0.0) if u == first and first else 0.0)
            flowing = self._parted(unit.boundary_grad_bytes, 0.0)
            inside = max(0.0, self._parted(unit.backward_peak_bytes, 0.0) - self.gradients[u])
            again = self._parted(unit.again_bytes, unit.again_sharded_bytes)
            backward = max(backward, alive + flowing + inside + again)
        return forward, backward
