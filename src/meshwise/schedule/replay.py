"""The one replay of a program: run it on a clock, prove that it cannot hang, and draw it.

Sends never block and receives wait, so the order in which ranks are looked at changes nothing: a
program either always ends or always hangs. One replay is therefore a proof for this program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwise.errors import DeadlockError
from meshwise.schedule.actions import CELLS, RECEIVES, SENDS, Action, Op, Program, matching

Seconds = float | Sequence[float]
"""Seconds: one number for all, or one for each stage (for each rank in the tail of a step)."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Say what each action costs, in seconds for one cell.

    Cells and ``couple`` are for each stage; a stage of k segments spends 1/k of its cell in each.
    ``backward_input`` and ``backward_weight`` are half of ``backward`` each where they are not given.
    ``transfer`` is for each boundary (s: between stage s and s + 1), in either direction; messages from
    one rank to another go one after the other. ``reduce``, ``clip`` and ``update`` are for each rank.
    """

    forward: Seconds
    backward: Seconds
    backward_input: Seconds | None = None
    backward_weight: Seconds | None = None
    transfer: Seconds = 0.0
    couple: Seconds = 0.0
    reduce: Seconds = 0.0
    clip: Seconds = 0.0
    update: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Say when a rank did an action, in seconds from the start of the step.

    A send takes no time of its rank; a receive lasts as long as its rank waits.
    """

    rank: int
    action: Action
    start: float
    end: float

    def __str__(self) -> str:
        return f"rank {self.rank} {self.action} {self.start:.6g}..{self.end:.6g} s"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Hold one step on the clock.

    ``spans`` are in program order rank after rank; ``seconds`` is the end of the step; ``peak_live[r]``
    the largest number of cells whose activations rank r holds at once; ``bubble`` the share of
    rank-seconds that is neither computing nor in a collective (0..1).
    """

    spans: tuple[Span, ...]
    seconds: float
    peak_live: tuple[int, ...]
    bubble: float

    def __str__(self) -> str:
        live = ", ".join(map(str, self.peak_live))
        return f"{self.seconds:.6g} s a step, bubble {self.bubble:.1%}, peak live activations a rank: {live}"


def replay(program: Program, *, costs: Costs) -> Timeline:
    """Run a program on a clock and return its timeline.

    Raises DeadlockError, naming ranks and actions, where a rank waits for something that never comes,
    where a send is never received, and where an action occurs twice or on two ranks.
    """
    facts = _read(program)
    rows = _Clock(facts, costs).run()
    _check_sends(facts)
    return summarize(rows)


def summarize(rows: Sequence[Sequence[Span]]) -> Timeline:
    """Make a timeline of the spans of each rank, predicted or measured; each row in program order."""
    spans = tuple(span for row in rows for span in row)
    seconds = max((span.end for span in spans), default=0.0)
    busy = sum(span.end - span.start for span in spans if span.action.op not in RECEIVES)
    return Timeline(
        spans=spans,
        seconds=seconds,
        peak_live=tuple(_peak_live([span.action for span in row]) for row in rows),
        bubble=1 - busy / (len(rows) * seconds) if seconds else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Hold what the rules need to know about a program."""

    program: Program
    position: dict[Action, tuple[int, int]]  # rank and index; without the tail
    owner: dict[int, int]  # stage -> rank
    last_segment: dict[int, int]  # by stage
    microbatches: dict[int, list[int]]  # by stage
    clip_index: tuple[int | None, ...]  # by rank: where it clips

    def is_local(self, stage: int, other: int) -> bool:
        return self.owner.get(stage) == self.owner.get(other)


def _read(program: Program) -> _Facts:
    position: dict[Action, tuple[int, int]] = {}
    owner: dict[int, int] = {}
    last_segment: dict[int, int] = {}
    microbatches: dict[int, list[int]] = {}
    clip_index: list[int | None] = [None] * len(program)
    for rank, actions in enumerate(program):
        _check_once(rank, actions)
        for index, action in enumerate(actions):
            if action.op is Op.CLIP:
                clip_index[rank] = index
            if action.stage < 0:
                continue
            if owner.setdefault(action.stage, rank) != rank:
                raise DeadlockError(
                    f"rank {rank} does {action}, but stage {action.stage} is on rank {owner[action.stage]}; "
                    "give all actions of a stage to one rank."
                )
            position[action] = (rank, index)
            if action.op is Op.FORWARD:
                last_segment[action.stage] = max(action.segment, last_segment.get(action.stage, 0))
                if action.segment == 0:
                    microbatches.setdefault(action.stage, []).append(action.microbatch)
    return _Facts(
        program=program,
        position=position,
        owner=owner,
        last_segment=last_segment,
        microbatches=microbatches,
        clip_index=tuple(clip_index),
    )


def _check_once(rank: int, actions: tuple[Action, ...]) -> None:
    if len(set(actions)) < len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise DeadlockError(f"rank {rank} does {twice} twice; each action of a step occurs once.")


def _check_sends(facts: _Facts) -> None:
    sends = [action for action in facts.position if action.op in SENDS]
    lost = [send for send in sends if matching(send) not in facts.position]
    if lost:
        named = ", ".join(f"{action} (rank {facts.position[action][0]})" for action in lost)
        raise DeadlockError(f"sent, but never received: {named}; give every send one receive.")


def _needs(action: Action, facts: _Facts) -> list[Action]:
    """Return the actions that must have ended before this one can start."""
    stage, microbatch, segment = action.stage, action.microbatch, action.segment
    last = facts.last_segment.get(stage, 0)
    match action.op:
        case Op.FORWARD:
            return _forward_needs(action, facts)
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            return [Action(Op.FORWARD, stage, microbatch, segment), *_gradient_needs(action, facts)]
        case Op.BACKWARD_WEIGHT:
            return [Action(Op.BACKWARD_INPUT, stage, microbatch, segment)]
        case Op.SEND_ACTIVATION:
            return [Action(Op.FORWARD, stage, microbatch, last)]
        case Op.SEND_GRADIENT:
            return [_backward_of(stage, microbatch, 0, facts)]
        case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
            return [matching(action)]
        case Op.COUPLE_FORWARD:
            return [Action(Op.FORWARD, stage, m, segment) for m in facts.microbatches.get(stage, [])]
        case Op.COUPLE_BACKWARD if segment == last:  # of the loss
            return [Action(Op.COUPLE_FORWARD, stage, segment=last)]
        case Op.COUPLE_BACKWARD:
            return [_backward_of(stage, m, segment + 1, facts) for m in facts.microbatches.get(stage, [])]
        case _:
            return []


def _forward_needs(action: Action, facts: _Facts) -> list[Action]:
    stage, microbatch, segment = action.stage, action.microbatch, action.segment
    if segment > 0:
        return [Action(Op.COUPLE_FORWARD, stage, segment=segment - 1)]
    if stage == 0:
        return []
    if facts.is_local(stage, stage - 1):
        return [Action(Op.FORWARD, stage - 1, microbatch, facts.last_segment.get(stage - 1, 0))]
    return [Action(Op.RECEIVE_ACTIVATION, stage, microbatch)]


def _gradient_needs(action: Action, facts: _Facts) -> list[Action]:
    """Return where the gradient of a cell's output comes from."""
    stage, microbatch, segment = action.stage, action.microbatch, action.segment
    if segment < facts.last_segment.get(stage, 0):
        return [Action(Op.COUPLE_BACKWARD, stage, segment=segment)]
    if stage == max(facts.owner):
        loss = Action(Op.COUPLE_FORWARD, stage, segment=segment)
        return [Action(Op.COUPLE_BACKWARD, stage, segment=segment)] if loss in facts.position else []
    if facts.is_local(stage, stage + 1):
        return [_backward_of(stage + 1, microbatch, 0, facts)]
    return [Action(Op.RECEIVE_GRADIENT, stage, microbatch)]


def _backward_of(stage: int, microbatch: int, segment: int, facts: _Facts) -> Action:
    """Return the action that gives the gradient of a cell's input: whole or split."""
    split = [Action(op, stage, microbatch, segment) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    is_split = any(action in facts.position for action in split)
    return split[0] if is_split else Action(Op.BACKWARD, stage, microbatch, segment)


@dataclass
class _Clock:
    """Run every rank as far as it can go, again and again, until all have ended or none can go on."""

    facts: _Facts
    costs: Costs
    now: list[float] = field(init=False)
    ended: dict[Action, float] = field(init=False)  # for a send: when it has arrived
    link_free: dict[tuple[int, int], float] = field(init=False)
    spans: list[list[Span]] = field(init=False)

    def __post_init__(self) -> None:
        num_ranks = len(self.facts.program)
        self.now = [0.0] * num_ranks
        self.ended = {}
        self.link_free = {}
        self.spans = [[] for _ in range(num_ranks)]

    def run(self) -> list[list[Span]]:
        """Return the spans of each rank, or raise DeadlockError."""
        while any(self._head(rank) for rank in range(len(self.now))):
            if not any([self._advance(rank) for rank in range(len(self.now))]):
                raise DeadlockError(self._explain())
        return self.spans

    def _head(self, rank: int) -> Action | None:
        actions = self.facts.program[rank]
        return actions[len(self.spans[rank])] if len(self.spans[rank]) < len(actions) else None

    def _advance(self, rank: int) -> bool:
        moved = False
        while (action := self._head(rank)) and (ready := self._ready(rank, action)) is not None:
            self._do(rank, action, ready)
            moved = True
        return moved

    def _ready(self, rank: int, action: Action) -> float | None:
        """Return when an action can start, or None while that is not known."""
        if action.op is Op.CLIP:
            return self._meeting()
        latest = self.now[rank]
        for need in _needs(action, self.facts):
            if need not in self.ended:
                return None
            latest = max(latest, self.ended[need])
        return latest

    def _meeting(self) -> float | None:
        """Return when the last rank comes to CLIP: the norm is taken over the stages of all ranks."""
        latest = 0.0
        for spans, index in zip(self.spans, self.facts.clip_index, strict=True):
            if index is None or len(spans) < index:
                return None
            latest = max(latest, spans[index - 1].end if index else 0.0)
        return latest

    def _do(self, rank: int, action: Action, ready: float) -> None:
        start = self.now[rank] if action.op in RECEIVES else ready
        end = ready + _seconds(action, rank, self.costs, self.facts)
        self.spans[rank].append(Span(rank=rank, action=action, start=start, end=end))
        self.now[rank] = end
        self.ended[action] = self._arrival(rank, action, end) if action.op in SENDS else end

    def _arrival(self, rank: int, action: Action, start: float) -> float:
        target = matching(action).stage
        link = (rank, self.facts.owner.get(target, -1))
        seconds = _pick(self.costs.transfer, min(action.stage, target))
        self.link_free[link] = max(start, self.link_free.get(link, 0.0)) + seconds
        return self.link_free[link]

    def _explain(self) -> str:
        waiting = [(rank, head) for rank in range(len(self.now)) if (head := self._head(rank))]
        lines = [f"  rank {rank} waits at {head} for {self._missing(head)}" for rank, head in waiting]
        return "the program hangs: no rank can go on\n" + "\n".join(lines)

    def _missing(self, action: Action) -> str:
        if action.op is Op.CLIP:
            never = [str(rank) for rank, index in enumerate(self.facts.clip_index) if index is None]
            return f"all ranks to come to clip; rank {', '.join(never) or 'none'} never does"
        need = next(need for need in _needs(action, self.facts) if need not in self.ended)
        if need not in self.facts.position:
            return f"{need}, which no rank does"
        return f"{need}, which rank {self.facts.position[need][0]} does later"


def _seconds(action: Action, rank: int, costs: Costs, facts: _Facts) -> float:
    match action.op:
        case Op.REDUCE:
            return _pick(costs.reduce, rank)
        case Op.CLIP:
            return _pick(costs.clip, rank)
        case Op.UPDATE:
            return _pick(costs.update, rank)
        case Op.COUPLE_FORWARD | Op.COUPLE_BACKWARD:
            return _pick(costs.couple, action.stage)
        case op if op in CELLS:
            num_segments = facts.last_segment.get(action.stage, 0) + 1
            return _cell_seconds(op, action.stage, costs) / num_segments
        case _:
            return 0.0  # a send is handed to the link; a receive only waits


def _cell_seconds(op: Op, stage: int, costs: Costs) -> float:
    if op is Op.FORWARD:
        return _pick(costs.forward, stage)
    if op is Op.BACKWARD:
        return _pick(costs.backward, stage)
    seconds = costs.backward_input if op is Op.BACKWARD_INPUT else costs.backward_weight
    return _pick(costs.backward, stage) / 2 if seconds is None else _pick(seconds, stage)


def _pick(seconds: Seconds, index: int) -> float:
    return seconds if isinstance(seconds, int | float) else seconds[index]


def _peak_live(actions: Sequence[Action]) -> int:
    """Count activations from the first FORWARD of a cell to the end of what needs them last."""
    live = peak = 0
    for action in actions:
        if action.segment:
            continue
        if action.op is Op.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            live -= 1
    return peak


def draw(timeline: Timeline, *, width: int = 120) -> str:
    """Draw a timeline as text of at most about ``width`` columns, one row for each rank.

    ``F3`` is the forward of microbatch 3 (``F9.3`` that of stage 9, where ranks hold several stages),
    dashes go on with it, dots are idle; where labels do not fit, only letters are drawn::

        rank 0 |F0 F1 .........B0--- B1---
        rank 1 |...F0 F1 B0--- B1---
    """
    busy = [span for span in timeline.spans if span.action.op not in RECEIVES and span.end > span.start]
    cells = [span for span in busy if span.action.op in CELLS]
    many = len({span.action.stage for span in cells}) > len(timeline.peak_live)
    scale = _columns_per_second(cells, timeline.seconds, many, width)
    rows = [
        _draw_row([span for span in busy if span.rank == rank], scale, many)
        for rank in range(len(timeline.peak_live))
    ]
    return "\n".join(f"rank {rank} |{row}" for rank, row in enumerate(rows))


def _columns_per_second(cells: list[Span], seconds: float, many: bool, width: int) -> float:
    """Give the shortest cell room for a label, or else a whole number of columns where the width allows."""
    shortest = min((span.end - span.start for span in cells), default=seconds or 1.0)
    longest_label = max((len(_label(span.action, many)) for span in cells), default=0)
    columns = min(longest_label + 1, width * shortest / (seconds or 1.0))
    return (int(columns) if columns >= 1 else columns) / shortest


def _draw_row(spans: list[Span], columns_per_second: float, many: bool) -> str:
    row = ""
    for span in spans:
        start, end = round(span.start * columns_per_second), round(span.end * columns_per_second)
        row = row.ljust(start, ".")
        row += _draw_cell(_label(span.action, many), end - len(row))
    return row.rstrip()


def _draw_cell(label: str, num_columns: int) -> str:
    """Fill a cell with its label, or with its letter alone where the label would be cut."""
    if num_columns <= len(label):
        return (label[0] * max(1, num_columns - 1)).ljust(num_columns)[:num_columns]
    return label.ljust(num_columns - 1, "-") + " "


def _label(action: Action, many: bool) -> str:
    if many or action.op not in CELLS:
        return str(action)
    suffix = f"/{action.segment}" if action.segment else ""
    return f"{action.op.value}{action.microbatch}{suffix}"
