"""Turn what ranks noted of one step into bars and parts of time; and what was predicted, alike.

::

    rank 1   |  wait  |=F1.0=|=B1.0=|          a wait before its sender had sent is bubble, after that communication
    rank 0   |=F0.0=| S ............ |=B0.0=|
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..layout import Layout
from ..plans import TIME_PARTS, Estimate
from ..schedule.actions import CELLS, COUPLES, RECEIVES, SENDS, Action, Op, matching
from ..schedule.replay import Timeline
from .comparison import Bar

Noted = tuple[Action | None, float, float]  # None: bringing data
TAIL = {Op.REDUCE: "exchange", Op.CLIP: "clip", Op.UPDATE: "update"}


def bars_of(spans: Sequence[Sequence[Noted]]) -> tuple[Bar, ...]:
    """Give the bars of all ranks of one step; time 0 is when the first of them began."""
    begun = min((s for row in spans for _, s, _ in row), default=0.0)
    found: list[Bar] = []
    for rank, row in enumerate(spans):
        loads = sorted((s, e) for action, s, e in row if action is None)
        found += [Bar(rank=rank, kind="load", label="load", start=s - begun, end=e - begun) for s, e in loads]
        for action, start, end in row:
            if action is None or (action.op in SENDS and end - start < 1e-6):
                continue
            inside = [(s, e) for s, e in loads if start <= s and e <= end]
            first = max((e for _, e in inside), default=start)  # a cell brings its data before it computes
            found.append(Bar(rank=rank, kind=_kind(action), label=str(action), start=first - begun, end=end - begun))
    return tuple(sorted(found, key=lambda bar: (bar.rank, bar.start)))


def _kind(action: Action) -> str:
    if action.op in CELLS:
        return action.op.value
    if action.op in RECEIVES:
        return "wait"
    return TAIL.get(action.op, "exchange")


def measured_parts(spans: Sequence[Sequence[Noted]], layout: Layout, step_seconds: float) -> dict[str, float]:
    """Divide a step of the busiest rank among plan.TIME_PARTS; they add up to ``step_seconds``."""
    rows = [row for row in spans if row]
    if not rows or not step_seconds:
        return {}
    busy = [sum(e - s for a, s, e in row if a is not None and a.op in CELLS) for row in spans]
    rank = max(range(len(spans)), key=busy.__getitem__)
    parts = dict.fromkeys(TIME_PARTS, 0.0)
    sent = _sent(spans, layout)
    dp_index = rank // layout.pp
    for action, start, end in spans[rank]:
        for name, seconds in _shares(action, start, end, sent.get(dp_index, {})):
            parts[name] += seconds
    parts["compute"] -= parts["data"]
    whole = max(e for row in rows for _, _, e in row) - min(s for row in rows for _, s, _ in row)
    parts["other"] += max(0.0, whole - sum(parts.values()))
    total = sum(parts.values())
    return {name: seconds * step_seconds / total for name, seconds in parts.items()}


def _sent(spans: Sequence[Sequence[Noted]], layout: Layout) -> dict[int, dict[Action, float]]:
    """Note for each replica when each message had been sent."""
    found: dict[int, dict[Action, float]] = {}
    for rank, row in enumerate(spans):
        mine = found.setdefault(rank // layout.pp, {})
        mine.update({a: e for a, _, e in row if a is not None and a.op in SENDS})
    return found


def _shares(
    action: Action | None, start: float, end: float, sent: Mapping[Action, float]
) -> Iterator[tuple[str, float]]:
    if action is None:
        yield "data", end - start
    elif action.op in CELLS:
        yield "compute", end - start
    elif action.op in RECEIVES:
        ready = min(end, max(start, sent.get(matching(action), start)))
        yield "bubble", ready - start
        yield "communication", end - ready
    elif action.op in SENDS or action.op in COUPLES or action.op is Op.REDUCE:
        yield "communication", end - start
    elif action.op is Op.UPDATE:
        yield "optimizer", end - start
    else:
        yield "other", end - start


def predicted_bars(timeline: Timeline, estimate: Estimate, layout: Layout) -> tuple[Bar, ...]:
    """Give the bars of a predicted step; every replica's are the same."""
    tail_begins = timeline.seconds
    found: list[Bar] = []
    for replica in range(layout.dp):
        for span in timeline.spans:
            if span.end > span.start:
                rank = replica * layout.pp + span.rank
                kind = _kind(span.action)
                found.append(Bar(rank=rank, kind=kind, label=str(span.action), start=span.start, end=span.end))
    exchange = max(0.0, estimate.seconds - tail_begins - estimate.time_parts.get("optimizer", 0.0))
    for rank in range(layout.dp * layout.pp):
        at = tail_begins
        for kind, seconds in (("exchange", exchange), ("update", estimate.time_parts.get("optimizer", 0.0))):
            if seconds > 0:
                found.append(Bar(rank=rank, kind=kind, label=kind, start=at, end=at + seconds))
                at += seconds
    return tuple(sorted(found, key=lambda bar: (bar.rank, bar.start)))
