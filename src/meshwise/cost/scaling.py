"""From counts at one and at two samples to any microbatch size: what a unit does and keeps is affine in the samples."""

from __future__ import annotations

import dataclasses
from typing import Any

from .profile import Profile, UnitProfile, Work


def at_microbatch(one: Profile, two: Profile, size: int) -> Profile:
    """Give the profile at ``size`` samples from those at 1 and 2 (counted, not timed)."""
    units = tuple(_unit(a, b, size) for a, b in zip(one.units, two.units, strict=True))
    return dataclasses.replace(
        one,
        microbatch_size=size,
        units=units,
        batch_bytes=_line(one.batch_bytes, two.batch_bytes, size),
        loss_bytes=_line(one.loss_bytes, two.loss_bytes, size),
    )


def _line(one: float, two: float, size: int) -> float:
    return max(0.0, one + (two - one) * (size - 1))


def _unit(one: UnitProfile, two: UnitProfile, size: int) -> UnitProfile:
    work = tuple(_work(a, b, size) for a, b in zip(one.work, two.work, strict=True)) if _alike(one, two) else two.work
    return dataclasses.replace(one, work=work, **_numbers(one, two, size))


def _alike(one: UnitProfile, two: UnitProfile) -> bool:
    return [(w.op, w.count) for w in one.work] == [(w.op, w.count) for w in two.work]


def _work(one: Work, two: Work, size: int) -> Work:
    return dataclasses.replace(one, **_numbers(one, two, size))


def _numbers(one: Any, two: Any, size: int) -> dict[str, Any]:
    """Continue every figure that is in bytes or FLOPs."""
    names = [f.name for f in dataclasses.fields(one) if f.name.endswith(("_bytes", "_flops"))]
    return {n: _line(getattr(one, n), getattr(two, n), size) for n in names}
