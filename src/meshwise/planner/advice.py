"""Say what a search found as an engineer would: what to take, what limits it, what would change it, how sure it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..cost.profile import Profile
from ..hardware.cluster import Cluster, Link, Measured
from ..layout import Layout
from ..plans import Candidate, Rejection
from ..quantities import format_bytes, format_seconds
from .search import Found, Task, consider

SMALL = 0.03  # shares below this are not worth a sentence
MANY_MICROBATCHES = 4  # what "a bigger batch" is tried with
PART_NAMES = {
    "compute": "computing",
    "recompute": "forwards that run again",
    "tensor": "tp's collectives",
    "communication": "communication that nothing hides",
    "bubble": "the pipeline's bubble",
    "data": "bringing data",
    "optimizer": "adding gradients up and updating",
    "other": "what a step costs beside its cells",
}


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Hold one change that was tried on paper, and the best layout under it."""

    change: str
    best: Candidate | None


def advise(task: Task, found: Found, chosen: Candidate) -> tuple[str, ...]:
    """Give the sentences, most important first."""
    others = [c for c in found.candidates if c is not chosen and c.layout != chosen.layout]
    lines = [_take(task, chosen), _limits(chosen)]
    profile, _ = task.inputs(chosen.microbatch_size)
    lines += _model(profile, task)
    lines += _beside(chosen, others)
    lines += _refused(found.rejected)
    lines += _changes(chosen, what_ifs(task, [chosen, *others[:4]], found.rejected))
    lines.append(_sure(chosen, others))
    return tuple(line for line in lines if line)


# ---- what to take, and what limits it ------------------------------------------------------------------------


def _take(task: Task, chosen: Candidate) -> str:
    layout, estimate = chosen.layout, chosen.estimate
    time = f"{format_seconds(estimate.seconds)} a step predicted"
    if chosen.measured_seconds is not None:
        time = (
            f"{format_seconds(chosen.measured_seconds)} a step measured ({format_seconds(estimate.seconds)} predicted)"
        )
    of = "" if task.limit_bytes is None else f" of {format_bytes(task.limit_bytes)}"
    held = f"{format_bytes(estimate.peak_bytes)}{of} on the fullest rank"
    size = f" with microbatches of {chosen.microbatch_size}" if len(task.profiles) > 1 else ""
    return f"Take {layout}{size}: {time}, {held}."


def _limits(chosen: Candidate) -> str:
    parts = sorted(((v, k) for k, v in chosen.estimate.time_parts.items()), reverse=True)
    total = chosen.estimate.seconds
    named = [f"{PART_NAMES.get(k, k)} {v / total:.0%}" for v, k in parts if v >= SMALL * total]
    (largest, name) = parts[0]
    if name in ("compute", "recompute"):
        return f"It is limited by computing: {', '.join(named)}."
    return f"{PART_NAMES.get(name, name).capitalize()} limits it ({largest / total:.0%} of a step): {', '.join(named)}."


def _model(profile: Profile, task: Task) -> Iterator[str]:
    """Say where parameters and time sit, where that is uneven, and what it means for dp against pp."""
    sizes = parameter_shares(profile)
    seconds = time_shares(profile, task)
    total_bytes, total_seconds = sum(sizes), sum(seconds)
    if len(sizes) < 4 or not total_bytes or not total_seconds:
        return
    top = max(range(len(sizes)), key=sizes.__getitem__)
    share, its_time = sizes[top] / total_bytes, seconds[top] / total_seconds
    if share < 0.3 or its_time > share / 2:
        return
    low, high = _busiest(seconds)
    name = f'"{profile.units[top].name}"'
    where = f'"{profile.units[low].name}" to "{profile.units[high - 1].name}"'
    moved = sum(p.num_bytes for p in profile.parameters.values() if p.trainable)
    handed = [u.boundary_bytes for u in profile.units[:-1]]
    yield (
        f"{share:.0%} of the parameters sit in {name}, which takes {its_time:.0%} of the time; "
        f"{sum(seconds[low:high]) / total_seconds:.0%} of the time goes into {where}. "
        f"So dp exchanges {format_bytes(moved)} of gradients a step, mostly for {name}, whereas pp hands over "
        f"{format_bytes(min(handed))} to {format_bytes(max(handed))} for each microbatch; and a cut into equal counts "
        "of layers or parameters would leave ranks idle."
    )


def parameter_shares(profile: Profile) -> list[float]:
    """Give the bytes of the parameters that each unit is the first to use."""
    seen: set[str] = set()
    sizes = []
    for unit in profile.units:
        new = [n for n in unit.params if n in profile.parameters and n not in seen]
        seen.update(new)
        sizes.append(float(sum(profile.parameters[n].num_bytes for n in new)))
    return sizes


def time_shares(profile: Profile, task: Task) -> list[float]:
    """Give each unit's seconds, forward and backward of one microbatch."""
    table = task.price(profile, Layout()).table
    return [table.seconds(u, u + 1) for u in range(len(profile.units))]


def _busiest(seconds: Sequence[float]) -> tuple[int, int]:
    """Give the shortest run of units that takes at least 80 percent of the time."""
    total, best = sum(seconds), (0, len(seconds))
    prefix = [0.0, *itertools.accumulate(seconds)]
    low = 0
    for high in range(1, len(prefix)):
        while prefix[high] - prefix[low + 1] >= 0.8 * total:
            low += 1
        if prefix[high] - prefix[low] >= 0.8 * total and high - low < best[1] - best[0]:
            best = (low, high)
    return best


def _beside(chosen: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    """Say why the next best of another kind is slower."""
    kinds = {_kind(chosen.layout)}
    for other in others:
        if _kind(other.layout) in kinds:
            continue
        kinds.add(_kind(other.layout))
        ratio = other.seconds / chosen.seconds if chosen.seconds else 1.0
        worse = _difference(chosen, other)
        pace = f"takes {ratio:.2f} times as long" if ratio >= 1.005 else "is as fast"
        yield f"{other.layout} {pace}{worse}, and {format_bytes(other.estimate.peak_bytes)} on its fullest rank."
        if len(kinds) > 3:
            return


def _kind(layout: Layout) -> tuple[bool, bool, bool]:
    return layout.dp > 1, layout.pp > 1, layout.tp > 1


def _difference(chosen: Candidate, other: Candidate) -> str:
    """Name the part of time by which another layout loses most."""
    here, there = chosen.estimate.time_parts, other.estimate.time_parts
    lost = sorted(((there.get(k, 0.0) - here.get(k, 0.0), k) for k in there), reverse=True)
    value, name = lost[0]
    return f" ({PART_NAMES.get(name, name)}: {format_seconds(value)} more)" if value > SMALL * chosen.seconds else ""


def _refused(rejected: Sequence[Rejection]) -> Iterator[str]:
    """Name the layouts that memory rules out; others say it themselves."""
    full = [r for r in rejected if r.held_bytes is not None]
    if full:
        rest = f" (and {len(full) - 2} more)" if len(full) > 2 else ""
        yield "Does not fit: " + "; ".join(str(r) for r in full[:2]) + rest + "."


# ---- what would change it ----------------------------------------------------------------------------------


def what_ifs(task: Task, candidates: Sequence[Candidate], rejected: Sequence[Rejection]) -> list[WhatIf]:
    """Try a faster link, a bigger batch and more memory on the best layouts, on paper."""
    layouts = [c.layout for c in candidates]
    if not task.cluster.is_here:  # replaying takes longer there, and there are thousands of layouts
        layouts = layouts[:2]
        task = _only(task, candidates[0].microbatch_size)
    found = [
        WhatIf(change="a link twice as fast", best=_best(replace(task, cluster=faster(task.cluster, 2.0)), layouts)),
        WhatIf(
            change=f"a batch {MANY_MICROBATCHES} times as large", best=_best(_more(task, MANY_MICROBATCHES), layouts)
        ),
    ]
    if task.limit_bytes is not None and rejected:
        names = [Layout.parse(r.layout) for r in rejected if r.held_bytes is not None]
        roomy = replace(task, limit_bytes=2 * task.limit_bytes)
        more = names[:8] if task.cluster.is_here else names[:2]
        found.append(WhatIf(change="twice the memory", best=_best(roomy, [*layouts, *more])))
    return found


def _only(task: Task, microbatch_size: int) -> Task:
    """Give the task at one microbatch size."""
    profile, workload = task.inputs(microbatch_size)
    return replace(task, profiles=[profile], workloads=[workload])


def _best(task: Task, layouts: Sequence[Layout]) -> Candidate | None:
    tried = [
        consider(task, p, w, layout)
        for p, w in zip(task.profiles, task.workloads, strict=True)
        for layout in dict.fromkeys(layouts)
    ]
    fits = [c for c in tried if isinstance(c, Candidate)]
    return min(fits, key=lambda c: c.estimate.seconds, default=None)


def _more(task: Task, times: int) -> Task:
    workloads = [
        replace(w, batch_size=w.batch_size * times, num_microbatches=w.num_microbatches * times) for w in task.workloads
    ]
    return replace(task, workloads=workloads)


def faster(cluster: Cluster, factor: float) -> Cluster:
    """Give the cluster with all links so much faster."""
    levels = tuple(replace(level, link=_faster_link(level.link, factor)) for level in cluster.levels)
    measured = tuple(
        Measured(kind=m.kind, group=m.group, points=tuple((b, s / factor) for b, s in m.points))
        for m in cluster.measured
    )
    return replace(cluster, levels=levels, measured=measured)


def _faster_link(link: Link, factor: float) -> Link:
    return replace(
        link,
        latency_seconds=link.latency_seconds / factor,
        bytes_per_second=link.bytes_per_second * factor,
    )


def _changes(chosen: Candidate, tried: Sequence[WhatIf]) -> Iterator[str]:
    parts: list[str] = []
    for what in tried:
        if what.best is None:
            continue
        if what.best.layout != chosen.layout:
            parts.append(f"with {what.change}, {what.best.layout} would be best")
        elif "batch" not in what.change:
            gain = 1 - what.best.estimate.seconds / chosen.estimate.seconds
            if gain >= SMALL:
                parts.append(f"{what.change} would save {gain:.0%} of a step")
            elif "memory" not in what.change:
                parts.append(f"{what.change} would change nothing")
        else:
            gain = 1 - what.best.estimate.seconds / (MANY_MICROBATCHES * chosen.estimate.seconds)
            if gain >= SMALL:
                parts.append(f"{what.change} would take {gain:.0%} less time for each sample")
    if parts:
        text = "; ".join(parts)
        yield f"{text[0].upper()}{text[1:]}."


# ---- how sure -----------------------------------------------------------------------------------------------


def _sure(chosen: Candidate, others: Sequence[Candidate]) -> str:
    measured = [c for c in others if c.measured_seconds is not None]
    if chosen.measured_seconds is not None and measured:
        off = chosen.estimate.seconds / chosen.measured_seconds - 1
        second = min(measured, key=lambda c: c.seconds)
        ahead = second.seconds / chosen.seconds - 1
        return (
            f"How sure: the best {len(measured) + 1} were run here; the prediction for this one was {off:+.0%} off, "
            f"and it was {ahead:.0%} faster than the next ({second.layout})."
        )
    spread = chosen.estimate.spread
    uncounted = f" {' '.join(chosen.estimate.notes)}" if chosen.estimate.notes else ""
    if not others:
        return f"How sure: the time may be {spread:.0%} off; nothing else fits.{uncounted}"
    ahead = others[0].seconds / chosen.seconds - 1
    verdict = "clear" if ahead > spread else f"within the estimate's {spread:.0%}, so measure both to be sure"
    return f"How sure: the next ({others[0].layout}) is {ahead:.0%} slower, which is {verdict}.{uncounted}"
