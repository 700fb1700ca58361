"""Blocks: the units of one layer of a deep model, by its name; where stages begin, and what recompute keeps."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from .profile import Profile, UnitProfile

LAYER = re.compile(r"^(.*?\b\d+)(\.|$|#)")


def block_of(unit: UnitProfile) -> str:
    """Name the layer that a unit belongs to: its path up to the first number, or all of it."""
    found = LAYER.match(unit.name)
    return found.group(1) if found else unit.name


def block_ranges(profile: Profile) -> list[tuple[int, int]]:
    """Give the units of each block, front to back."""
    groups = itertools.groupby(range(len(profile.units)), key=lambda u: block_of(profile.units[u]))
    found = [list(units) for _, units in groups]
    return [(units[0], units[-1] + 1) for units in found]


def checkpointed(profile: Profile) -> Profile:
    """Give the profile of a model whose blocks keep only what they take, and run again in the backward.

    The working set of a block that runs again is what its units save; it is alive in that block's backward alone.
    """
    units = list(profile.units)
    for first, last in block_ranges(profile):
        if last - first < 2:
            continue
        inside = sum(u.saved_bytes + u.saved_input_bytes for u in units[first:last])
        sharded = sum(u.saved_sharded_bytes for u in units[first:last])
        taken = units[first - 1].boundary_bytes if first else profile.batch_bytes
        for k in range(first, last):
            units[k] = replace(
                units[k],
                saved_bytes=0.0,
                saved_input_bytes=taken if k == first else 0.0,
                saved_sharded_bytes=0.0,
                again_bytes=inside,
                again_sharded_bytes=sharded,
                boundary_unsaved_bytes=0.0,
            )
    return replace(profile, units=tuple(units))
