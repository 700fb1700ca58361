"""From counts at two microbatch sizes to any other: what a unit does and keeps is affine in the samples."""

from __future__ import annotations

import dataclasses
from typing import Any

from .profile import Profile, UnitProfile, Work


def at_microbatch(one: Profile, two: Profile, size: int) -> Profile:
    """Give the profile at ``size`` samples from those at two other sizes, 1 and 2 say (counted, not timed)."""
    low, high = one.microbatch_size, two.microbatch_size
    share = (size - low) / (high - low)
    units = tuple(_unit(a, b, share) for a, b in zip(one.units, two.units, strict=True))
    return dataclasses.replace(
        one,
        microbatch_size=size,
        units=units,
        batch_bytes=_line(one.batch_bytes, two.batch_bytes, share),
    )


def _line(one: float, two: float, share: float) -> float:
    return max(0.0, one + (two - one) * share)


def _unit(one: UnitProfile, two: UnitProfile, share: float) -> UnitProfile:
    pairs = _pairs(one.work, two.work)
    work = tuple(_work(a, b, share) for a, b in pairs)
    return dataclasses.replace(one, work=work, **_numbers(one, two, share))


def _pairs(one: tuple[Work, ...], two: tuple[Work, ...]) -> list[tuple[Work, Work]]:
    """Match the kinds of operations; where shapes fell together at one size only, products are put together by name."""
    if [(w.op, w.dtype, w.count) for w in one] == [(w.op, w.dtype, w.count) for w in two]:
        return list(zip(one, two, strict=True))
    first, second = _by_name(one), _by_name(two)
    return [(first[name], second[name]) for name in first if name in second]


def _by_name(work: tuple[Work, ...]) -> dict[tuple[str, str], Work]:
    found: dict[tuple[str, str], Work] = {}
    for w in work:
        key = (w.op, w.dtype)
        found[key] = _together(found[key], w) if key in found else w
    return found


def _together(a: Work, b: Work) -> Work:
    names = [f.name for f in dataclasses.fields(a) if f.name.endswith(("_bytes", "_flops", "count"))]
    return dataclasses.replace(a, shape=(), **{n: getattr(a, n) + getattr(b, n) for n in names})


def _work(one: Work, two: Work, share: float) -> Work:
    shape = tuple(round(_line(a, b, share)) for a, b in zip(one.shape, two.shape, strict=False))
    return dataclasses.replace(one, shape=shape, **_numbers(one, two, share))


def _numbers(one: Any, two: Any, share: float) -> dict[str, Any]:
    """Continue every figure that is in bytes or FLOPs."""
    names = [f.name for f in dataclasses.fields(one) if f.name.endswith(("_bytes", "_flops"))]
    return {n: _line(getattr(one, n), getattr(two, n), share) for n in names}
