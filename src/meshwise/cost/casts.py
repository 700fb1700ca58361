"""Casts of weights under mixed precision: once a step on GPUs that are not here; counting sees one a microbatch."""

from __future__ import annotations

from dataclasses import replace

from .profile import Profile, UnitProfile, Work

CAST_BYTES = 2  # of a weight in 16 bit
MOVED = 6  # bytes that a cast from fp32 to 16 bit, or back, reads and writes for each element


def cast_once(profile: Profile) -> Profile:
    """Take casts of weights out of the microbatch: a copy in 16 bit is kept beside each weight in fp32.

    It is counted with the optimizer's state, which ZeRO parts, as it does the fp32 weights of such frameworks.
    """
    cast: set[str] = set()
    units = []
    for unit in profile.units:
        names = [n for n in unit.params if n in profile.parameters and len(profile.parameters[n].shape) == 2]
        count = sum(profile.parameters[n].num_elements for n in names if _is_fp32(profile, n))
        copies = next((w for w in unit.work if w.op == "_to_copy" and w.forward_bytes >= MOVED * count), None)
        if not count or copies is None:
            units.append(unit)
            continue
        cast.update(names)
        units.append(_without(unit, count))
    parameters = {
        n: replace(p, optimizer_bytes=p.optimizer_bytes + CAST_BYTES * p.num_elements) if n in cast else p
        for n, p in profile.parameters.items()
    }
    return replace(profile, units=tuple(units), parameters=parameters)


def _is_fp32(profile: Profile, name: str) -> bool:
    return profile.parameters[name].num_bytes == 4 * profile.parameters[name].num_elements


def _without(unit: UnitProfile, count: int) -> UnitProfile:
    """Take a cast of so many weights, and of their gradients back, out of a unit."""
    return replace(
        unit,
        work=tuple(_less(w, MOVED * count) if w.op == "_to_copy" else w for w in unit.work),
        saved_bytes=max(0.0, unit.saved_bytes - CAST_BYTES * count),
        forward_peak_bytes=max(0.0, unit.forward_peak_bytes - CAST_BYTES * count),
    )


def _less(work: Work, num_bytes: float) -> Work:
    return replace(
        work,
        forward_bytes=max(0.0, work.forward_bytes - num_bytes),
        backward_bytes=max(0.0, work.backward_bytes - num_bytes),
    )
