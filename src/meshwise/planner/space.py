"""Which layouts there are for so many devices, and which of them are legal for a job; what is not says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..cost.estimate import Workload
from ..hardware.cluster import Cluster
from ..layout import Layout
from ..plans import Rejection

MOST_RANKS = 64  # of a pipeline; none longer was ever reported


@dataclass(frozen=True, kw_only=True)
class Space:
    """Say which choices are open. ``runnable`` leaves out what can be planned but not run yet."""

    runnable: bool = True
    recompute: bool = True
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")
    virtual: tuple[int, ...] = (2,)


def layouts(num_devices: int, cluster: Cluster, space: Space) -> Iterator[Layout]:
    """Give every layout whose axes multiply to ``num_devices``, plainest first."""
    node = cluster.levels[0].size if cluster.levels else 1
    for tp in _divisors(num_devices) if not space.runnable else [1]:
        if tp > node:  # a collective in every layer does not go over the network
            continue
        for pp in _divisors(num_devices // tp):
            if pp > MOST_RANKS:
                continue
            yield from _variants(Layout(dp=num_devices // tp // pp, pp=pp, tp=tp, sequence=tp > 1), space)


def _variants(plain: Layout, space: Space) -> Iterator[Layout]:
    zeros = (0,) if space.runnable or plain.dp == 1 else (0, 1, 3) if plain.pp == 1 else (0, 1)
    for recompute in (False, True) if space.recompute else (False,):
        for zero in zeros:
            base = replace(plain, recompute=recompute, zero=zero)
            if plain.pp == 1:
                yield base
                continue
            for schedule in space.schedules:
                for virtual in space.virtual if schedule == "interleaved" else (1,):
                    yield replace(base, schedule=schedule, virtual=virtual)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def illegal(
    layout: Layout, num_units: int, workload: Workload, *, is_here: bool, blocked: str = "", named_stages: int = 0
) -> Rejection | None:
    """Say why a layout is not legal for a job whose model can be cut in ``num_units`` pieces, None where it is."""
    name = str(layout)
    stages, units = layout.num_stages, num_units
    slots = min(workload.slots, workload.num_microbatches) if is_here else workload.num_microbatches
    if layout.pp > 1 and blocked:
        return Rejection(layout=name, reason=f"the model cannot be cut: {blocked}")
    if layout.pp > 1 and stages > units:
        return Rejection(layout=name, reason=f"{stages} stages, but the model has {units} units that can be parted")
    if layout.pp > 1 and named_stages and stages != named_stages:
        return Rejection(layout=name, reason=f"{stages} stages, but the job's own cuts make {named_stages}")
    if layout.dp > slots:
        what = "slots" if workload.slots < workload.num_microbatches else "microbatches"
        return Rejection(layout=name, reason=f"{layout.dp} replicas, but a step has only {slots} {what} to share")
    if workload.coupled and layout.pp > 1 and layout.schedule not in ("gpipe",):
        return Rejection(
            layout=name, reason="BatchNorm over the whole batch makes every schedule the same as gpipe; see there"
        )
    if layout.schedule != "gpipe" and layout.pp > 1 and workload.couples_loss:
        return Rejection(layout=name, reason="a loss over the whole batch makes every schedule the same as gpipe")
    return None
