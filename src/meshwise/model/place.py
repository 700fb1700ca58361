"""Where parameters and buffers live: the first capture places them on stages, and later ones keep to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CaptureError
from .units import Key, Unit

if TYPE_CHECKING:
    from .graph import Graph
    from .stages import Staged

Stages = tuple[int, ...]


@dataclass(kw_only=True)
class Placement:
    """Map each parameter to the stages that use it, and each buffer to the stage that changes (or reads) it.

    What no capture has used yet is on all ranks. ``keys`` names the first unit of each stage after the first.
    """

    pp: int
    keys: tuple[Key, ...] | None = None
    params: dict[str, Stages] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)

    def ranks(self, name: str) -> list[int]:
        """List the pipeline ranks that hold a parameter, its owner first; none where it was never used."""
        return list(dict.fromkeys(stage % self.pp for stage in self.params.get(name, ())))

    def add(self, staged: Staged) -> None:
        """Place what a capture uses. Raises CaptureError when it needs a parameter on another rank."""
        if self.keys is None:
            self.keys = tuple(staged.units[c].key for c in staged.cuts)
        for name, stages in _stages_of(staged).items():
            self._check(name, stages, staged.graph.training)
            if staged.graph.training:
                self.params.setdefault(name, stages)
        for stage, segments in enumerate(staged.stages):
            for segment in segments:
                rows = (*segment.statistics, *([segment.row] if segment.row else []))
                changed = [b.name for row in rows for b in (row.running_mean, row.running_var) if b]
                changed += [b for p in segment.opaque for b in staged.graph.module_buffers.get(p, ())]
                for name in (*segment.changes, *segment.rebinds, *changed):
                    self.buffers[name] = stage
                for name in segment.buffers:
                    self.buffers.setdefault(name, stage)

    def _check(self, name: str, stages: Stages, training: bool) -> None:
        held, used = set(self.ranks(name)), {stage % self.pp for stage in stages}
        if held and (used != held if training else not used <= held):
            raise CaptureError(
                f"parameter {name!r} is on stage {', '.join(map(str, self.params[name]))}, but this batch "
                f"(or eval mode) uses it on stage {', '.join(map(str, stages))}; name cuts for both with "
                "Job(cuts=[...]), or train under dp."
            )


def _stages_of(staged: Staged) -> dict[str, Stages]:
    found: dict[str, Stages] = {}
    for stage in range(len(staged.stages)):
        for name in staged.stage_params(stage):
            found[name] = (*found.get(name, ()), stage)
    return found


def repeat_cuts(graph: Graph, units: Sequence[Unit], placed: Placement) -> tuple[int, ...]:
    """Cut another capture of a model where its first one was cut, so that parameters stay on their stages.

    A stage that began with a unit which does not run now begins at the first that lives there, or anywhere
    behind the last that lives before it. Raises CaptureError when there is no such place.
    """
    assert placed.keys is not None
    index = {u.key: u.index for u in units}
    homes = {u.index: _home(u, placed) for u in units}
    cuts: list[int] = []
    for stage, key in enumerate(placed.keys, start=1):
        before = [u for u, home in homes.items() if home is not None and home < stage]
        behind = [u for u, home in homes.items() if home is not None and home >= stage]
        low = max([1, *(u + 1 for u in before), *(c + 1 for c in cuts)])
        high = min(behind, default=len(units) - 1)
        if graph.blocked or low > high:
            raise CaptureError(
                f"a stage begins at {key[0]!r}, but for this batch (or in eval mode) the model cannot be cut "
                f"there{': ' + graph.blocked if graph.blocked else ''}; name other cuts with Job(cuts=[...])."
            )
        wanted = index.get(key, high if behind else low)
        cuts.append(wanted if low <= wanted <= high else high)
    return tuple(cuts)


def _home(unit: Unit, placed: Placement) -> int | None:
    """Give the stage on which a unit's parameters live, where that is one."""
    found = {placed.params[p] for p in unit.params if len(placed.params.get(p, ())) == 1}
    return found.pop()[0] if len(found) == 1 else None
