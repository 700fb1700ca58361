"""Schedules and their replay: every program of up to 8 ranks x 16 microbatches is built and proved."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from meshwise.errors import DeadlockError, LayoutError
from meshwise.schedule.actions import (
    CELLS,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Program,
    matching,
    rank_of_stage,
)
from meshwise.schedule.library import SCHEDULES, build_program
from meshwise.schedule.replay import Costs, Span, Timeline, draw, replay, summarize

NUM_RANKS = range(1, 9)
NUM_MICROBATCHES = range(17)
KINDS = (
    ("gpipe", 1),
    ("gpipe", 2),
    ("gpipe", 3),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
)
TAIL = (Action(Op.REDUCE), Action(Op.CLIP), Action(Op.UPDATE))
FORWARD_SECONDS = 6.0  # of all the stages of a rank together: whole numbers for 1, 2 and 3 stages a rank


@functools.cache
def built(schedule: str, virtual: int, num_ranks: int, num_microbatches: int) -> Program:
    return build_program(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual=virtual)


@functools.cache
def timed(schedule: str, virtual: int, num_ranks: int, num_microbatches: int) -> Timeline:
    seconds = FORWARD_SECONDS / virtual
    program = built(schedule, virtual, num_ranks, num_microbatches)
    timeline = replay(program, costs=Costs(forward=seconds, backward=2 * seconds))
    assert [span.action for span in timeline.spans] == list(itertools.chain(*program))
    return dataclasses.replace(timeline, spans=())  # a third of a million spans would slow down the rest


def sizes(first_microbatches: int = 0) -> Iterator[tuple[int, int]]:
    return itertools.product(NUM_RANKS, range(first_microbatches, NUM_MICROBATCHES.stop))


def barrier_programs() -> Iterator[tuple[int, int, tuple[int, ...], bool, Program]]:
    """Yield every coupled program of up to 4 stages of 1..3 segments, on 1 and 3 microbatches."""
    for num_ranks, virtual in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        for segments in itertools.product((1, 2, 3), repeat=num_ranks * virtual):
            for couple_loss, num_microbatches in itertools.product((False, True), (1, 3)):
                if not couple_loss and max(segments) == 1:
                    continue
                program = build_program(
                    "gpipe",
                    num_ranks=num_ranks,
                    num_microbatches=num_microbatches,
                    virtual=virtual,
                    segments=segments,
                    couple_loss=couple_loss,
                )
                yield num_ranks, num_microbatches, segments, couple_loss, program


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_every_program_ends(schedule: str, virtual: int) -> None:
    """The replay of every schedule ends: no rank waits for what never comes."""
    for num_ranks, num_microbatches in sizes():
        assert (timed(schedule, virtual, num_ranks, num_microbatches).seconds > 0) == (num_microbatches > 0)


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_each_cell_runs_once_on_its_rank(schedule: str, virtual: int) -> None:
    """Every stage runs forward and backward on every microbatch once, and on the rank that holds it."""
    for num_ranks, num_microbatches in sizes():
        program = built(schedule, virtual, num_ranks, num_microbatches)
        cells = set(itertools.product(range(num_ranks * virtual), range(num_microbatches)))
        ran: dict[Op, list[tuple[int, int]]] = {op: [] for op in CELLS}
        for rank, actions in enumerate(program):
            for action in actions:
                assert action.stage < 0 or rank_of_stage(action.stage, num_ranks) == rank
                if action.op in CELLS:
                    ran[action.op].append((action.stage, action.microbatch))
        assert sorted(ran[Op.FORWARD]) == sorted(cells)
        assert sorted(ran[Op.BACKWARD] + ran[Op.BACKWARD_INPUT]) == sorted(cells)
        assert sorted(ran[Op.BACKWARD_WEIGHT]) == sorted(ran[Op.BACKWARD_INPUT])


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_each_send_meets_one_receive(schedule: str, virtual: int) -> None:
    """Sends and receives match one to one, one pair for each crossed boundary, direction and microbatch."""
    for num_ranks, num_microbatches in sizes():
        actions = list(itertools.chain(*built(schedule, virtual, num_ranks, num_microbatches)))
        sends = Counter(action for action in actions if action.op in SENDS)
        receives = Counter(action for action in actions if action.op in RECEIVES)
        assert Counter(map(matching, sends)) == receives and set(sends.values()) <= {1}
        num_boundaries = num_ranks * virtual - 1 if num_ranks > 1 else 0
        assert len(sends) == 2 * num_boundaries * num_microbatches


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_messages_arrive_in_the_order_of_their_receives(schedule: str, virtual: int) -> None:
    """From one rank to another, activations are received in the order of sending, and so are gradients."""
    for num_ranks, num_microbatches in sizes():
        program = built(schedule, virtual, num_ranks, num_microbatches)
        for op, (source, target) in itertools.product(SENDS, itertools.permutations(range(num_ranks), 2)):
            sent = [
                matching(action)
                for action in program[source]
                if action.op is op and rank_of_stage(matching(action).stage, num_ranks) == target
            ]
            if sent:
                wanted = set(sent)
                assert sent == [action for action in program[target] if action in wanted]


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_backwards_run_in_microbatch_order(schedule: str, virtual: int) -> None:
    """The backwards of a stage run in increasing microbatch order, as bitwise sums need it."""
    for num_ranks, num_microbatches in sizes():
        for actions in built(schedule, virtual, num_ranks, num_microbatches):
            assert_increasing(actions)


def assert_increasing(actions: tuple[Action, ...]) -> None:
    order: dict[tuple[Op, int, int], list[int]] = {}
    for action in actions:
        if action.op in CELLS - {Op.FORWARD}:
            order.setdefault((action.op, action.stage, action.segment), []).append(action.microbatch)
    assert all(microbatches == sorted(microbatches) for microbatches in order.values())


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_sends_follow_and_receives_precede_their_cell(schedule: str, virtual: int) -> None:
    """A send stands right after the cell that makes its tensor, a receive right before its user."""
    backwards = {Op.BACKWARD, Op.BACKWARD_INPUT}
    cells = {
        Op.SEND_ACTIVATION: {Op.FORWARD},
        Op.RECEIVE_ACTIVATION: {Op.FORWARD},
        Op.SEND_GRADIENT: backwards,
        Op.RECEIVE_GRADIENT: backwards,
    }
    for num_ranks, num_microbatches in sizes():
        for actions in built(schedule, virtual, num_ranks, num_microbatches):
            for index, action in enumerate(actions):
                if action.op in cells:
                    cell = actions[index - 1 if action.op in SENDS else index + 1]
                    assert cell.op in cells[action.op]
                    assert (cell.stage, cell.microbatch) == (action.stage, action.microbatch)


def test_known_peaks_of_live_activations() -> None:
    """gpipe holds all M microbatches, 1f1b min(M, p - rank), zero-bubble min(M, p) at most."""
    for p, m in sizes():
        for virtual in (1, 2, 3):
            assert timed("gpipe", virtual, p, m).peak_live == (m * virtual,) * p
        assert timed("1f1b", 1, p, m).peak_live == tuple(min(m, p - rank) for rank in range(p))
        assert timed("zero-bubble", 1, p, m).peak_live == (min(m, p),) * p


@pytest.mark.parametrize("virtual", [2, 3])
def test_known_peak_of_interleaved(virtual: int) -> None:
    """Interleaved holds (v - 1) p + 2 (p - rank - 1) + 1 cells, and fewer where p does not divide M."""
    for p, m in sizes():
        peaks = timed("interleaved", virtual, p, m).peak_live
        known = [min(m * virtual, (virtual - 1) * p + 2 * (p - rank - 1) + 1) for rank in range(p)]
        assert all(peak <= bound for peak, bound in zip(peaks, known, strict=True))
        assert m % p or list(peaks) == known


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_known_bubble(schedule: str) -> None:
    """On equal stages the bubble of gpipe and 1f1b is (p - 1) / (M + p - 1)."""
    for p, m in sizes(1):
        assert timed(schedule, 1, p, m).bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaved_has_a_smaller_bubble(virtual: int) -> None:
    """Interleaved beats 1f1b for any M past 1, and has (p - 1) / (v M + p - 1) where p divides M."""
    for p, m in sizes(1):
        bubble = timed("interleaved", virtual, p, m).bubble
        if p > 1 and m > 1:
            assert bubble < timed("1f1b", 1, p, m).bubble
        if m % p == 0:
            assert bubble == pytest.approx((p - 1) / (virtual * m + p - 1), abs=1e-12)


def test_zero_bubble_has_the_known_step() -> None:
    """ZB-H1 takes 3 M + p - 1 units of a forward once M reaches p, and always less than 1f1b."""
    for p, m in sizes(1):
        timeline = timed("zero-bubble", 1, p, m)
        assert timeline.seconds == FORWARD_SECONDS * max(3 * m + p - 1, 2 * m + 2 * p - 1)
        assert p == 1 or timeline.bubble < timed("1f1b", 1, p, m).bubble


def test_zero_bubble_never_splits_the_first_stage() -> None:
    """Stage 0 has no input gradient, so its backward stays whole; every other stage splits all of its own."""
    for p, m in sizes():
        for rank, actions in enumerate(built("zero-bubble", 1, p, m)):
            splits = [action for action in actions if action.op is Op.BACKWARD_INPUT]
            assert len(splits) == (m if rank else 0)


@pytest.mark.parametrize(("schedule", "virtual"), KINDS)
def test_idle_replica_holds_only_the_tail(schedule: str, virtual: int) -> None:
    """Without microbatches every rank only reduces, clips and updates."""
    for num_ranks in NUM_RANKS:
        assert built(schedule, virtual, num_ranks, 0) == (TAIL,) * num_ranks
    assert build_program(schedule, num_ranks=2, num_microbatches=0, virtual=virtual, tail=False) == ((), ())


def test_tail_can_be_left_out() -> None:
    """With tail=False the program is the same without REDUCE, CLIP and UPDATE."""
    for schedule, virtual in KINDS:
        settings: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 3, "virtual": virtual}
        bare = build_program(schedule, **settings, tail=False)
        assert tuple((*actions, *TAIL) for actions in bare) == build_program(schedule, **settings)


def test_barrier_program_of_two_ranks() -> None:
    """A coupled row inside stage 1 and a coupled loss give exactly this order."""
    program = build_program("1f1b", num_ranks=2, num_microbatches=2, segments=(1, 2), couple_loss=True)
    assert [" ".join(map(str, actions)) for actions in program] == [
        "F0.0 S>0.0 F0.1 S>0.1 R<0.0 B0.0 R<0.1 B0.1 reduce clip update",
        "R>1.0 F1.0 R>1.1 F1.1 C>1/0 F1.0/1 F1.1/1 C>1/1 "
        "C<1/1 B1.0/1 B1.1/1 C<1/0 B1.0 S<1.0 B1.1 S<1.1 reduce clip update",
    ]


def test_barrier_between_segments_of_the_first_stage() -> None:
    """A coupled row inside stage 0 makes it send after its last segment and receive before it."""
    program = build_program("1f1b", num_ranks=2, num_microbatches=2, segments=(2, 1), tail=False)
    assert [" ".join(map(str, actions)) for actions in program] == [
        "F0.0 F0.1 C>0/0 F0.0/1 S>0.0 F0.1/1 S>0.1 R<0.0 B0.0/1 R<0.1 B0.1/1 C<0/0 B0.0 B0.1",
        "R>1.0 F1.0 R>1.1 F1.1 B1.0 S<1.0 B1.1 S<1.1",
    ]


def test_every_barrier_program_ends() -> None:
    """Each coupled program ends, crosses each barrier once each way, and holds all microbatches alive."""
    costs = Costs(forward=1.0, backward=2.0, couple=0.5, transfer=0.25)
    for num_ranks, num_microbatches, segments, couple_loss, program in barrier_programs():
        timeline = replay(program, costs=costs)
        assert timeline.peak_live == (num_microbatches * len(segments) // num_ranks,) * num_ranks
        counts = Counter(action.op for action in itertools.chain(*program))
        num_barriers = sum(segments) - len(segments) + couple_loss
        assert counts[Op.COUPLE_FORWARD] == counts[Op.COUPLE_BACKWARD] == num_barriers
        assert counts[Op.FORWARD] == counts[Op.BACKWARD] == sum(segments) * num_microbatches
        for actions in program:
            assert_increasing(actions)


def test_barrier_waits_for_every_microbatch() -> None:
    """COUPLE_FORWARD(k) stands after FORWARD of k and before FORWARD of k + 1; backward mirrors it."""
    for _, _, _, _, program in barrier_programs():
        for actions in program:
            index = {action: i for i, action in enumerate(actions)}
            for couple in (action for action in actions if action.op is Op.COUPLE_FORWARD):
                back = Action(Op.COUPLE_BACKWARD, couple.stage, segment=couple.segment)
                for cell in (a for a in actions if a.op in CELLS and a.stage == couple.stage):
                    barrier = couple if cell.op is Op.FORWARD else back
                    before = (cell.segment <= couple.segment) == (cell.op is Op.FORWARD)
                    assert (index[cell] < index[barrier]) == before


def test_every_schedule_turns_into_the_barrier_order() -> None:
    """With coupled rows all schedules build the same program as gpipe."""
    for schedule, virtual in KINDS:
        settings: dict[str, Any] = {
            "num_ranks": 2,
            "num_microbatches": 3,
            "virtual": virtual,
            "couple_loss": True,
        }
        assert build_program(schedule, **settings) == build_program("gpipe", **settings)


def test_segments_of_one_change_nothing() -> None:
    """One segment for each stage is the same as none given."""
    assert build_program("1f1b", num_ranks=3, num_microbatches=4, segments=(1, 1, 1)) == built(
        "1f1b", 1, 3, 4
    )


@pytest.mark.parametrize(
    ("schedule", "settings", "rule"),
    [
        ("chimera", {}, "use one of gpipe, 1f1b, interleaved, zero-bubble"),
        ("interleaved", {}, "needs at least 2 stages a rank, but virtual=1"),
        ("1f1b", {"virtual": 2}, "use schedule=interleaved, or virtual=1"),
        ("zero-bubble", {"virtual": 3}, "has one stage a rank, but virtual=3"),
        ("gpipe", {"virtual": 0}, "virtual=0, but a rank holds at least one stage"),
        ("gpipe", {"num_ranks": 0}, "pp=0, but a pipeline has at least one rank"),
        ("gpipe", {"num_microbatches": -1}, "use 0 (an idle replica) or more"),
        ("gpipe", {"segments": (1, 2, 1)}, "3 stages, but the pipeline has 2"),
        ("gpipe", {"segments": (1, 0)}, "every stage has at least one"),
    ],
)
def test_illegal_settings_state_the_rule(schedule: str, settings: dict[str, Any], rule: str) -> None:
    """What no program exists for raises LayoutError, and the message holds the rule or the way out."""
    with pytest.raises(LayoutError) as caught:
        build_program(schedule, **{"num_ranks": 2, "num_microbatches": 4, **settings})
    assert rule in str(caught.value)


def hangs(program: Program) -> str:
    with pytest.raises(DeadlockError) as caught:
        replay(program, costs=Costs(forward=1.0, backward=2.0))
    return str(caught.value)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Two ranks that each want the other to go first raise DeadlockError with both waits."""
    message = hangs(
        (
            (Action(Op.FORWARD, 0, 0), Action(Op.RECEIVE_GRADIENT, 0, 0), Action(Op.SEND_ACTIVATION, 0, 0)),
            (
                Action(Op.RECEIVE_ACTIVATION, 1, 0),
                Action(Op.FORWARD, 1, 0),
                Action(Op.BACKWARD, 1, 0),
                Action(Op.SEND_GRADIENT, 1, 0),
            ),
        )
    )
    assert "rank 0 waits at R<0.0 for S<1.0, which rank 1 does later" in message
    assert "rank 1 waits at R>1.0 for S>0.0, which rank 0 does later" in message


def without(program: Program, action: Action) -> Program:
    return tuple(tuple(other for other in actions if other != action) for actions in program)


def test_any_missing_action_is_found() -> None:
    """Leaving out any action that another one of the replica depends on is found, and named."""
    programs = [
        built("1f1b", 1, 2, 2),
        built("gpipe", 2, 2, 2),
        built("zero-bubble", 1, 2, 2),
        build_program("gpipe", num_ranks=2, num_microbatches=2, segments=(2, 2), couple_loss=True),
    ]
    for program in programs:
        for action in set(itertools.chain(*program)):
            if not ends_the_replica(action):
                assert str(action) in hangs(without(program, action))


def ends_the_replica(action: Action) -> bool:
    """Say whether nothing waits for an action."""
    ends_a_cell = action.op is Op.BACKWARD and action.stage == 0 and action.segment == 0
    return action in TAIL or action.op is Op.BACKWARD_WEIGHT or ends_a_cell


def test_missing_send_and_missing_receive_are_named() -> None:
    """A receive without a send hangs, and a send without a receive is refused too."""
    program = built("1f1b", 1, 2, 2)
    assert "R>1.1 for S>0.1, which no rank does" in hangs(without(program, Action(Op.SEND_ACTIVATION, 0, 1)))
    no_gradient = tuple(
        tuple(a for a in actions if a.op not in (Op.RECEIVE_GRADIENT, Op.BACKWARD) or a.stage)
        for actions in program
    )
    assert "sent, but never received: S<1.0 (rank 1), S<1.1 (rank 1)" in hangs(no_gradient)


def test_local_order_is_proved_too() -> None:
    """A backward before its own forward, on one rank, hangs as well."""
    message = hangs(((Action(Op.BACKWARD, 0, 0), Action(Op.FORWARD, 0, 0)),))
    assert "rank 0 waits at B0.0 for F0.0, which rank 0 does later" in message


def test_clip_needs_every_rank() -> None:
    """A rank that never clips makes the others wait for the gradient norm."""
    assert "rank 0 waits at clip for all ranks to come to clip; rank 1 never does" in hangs(
        ((Action(Op.CLIP),), (Action(Op.UPDATE),))
    )


def test_repeated_and_scattered_actions_are_refused() -> None:
    """An action occurs once in a step, and a stage lives on one rank."""
    forward = Action(Op.FORWARD, 0, 0)
    assert "rank 0 does F0.0 twice" in hangs(((forward, forward),))
    assert "stage 0 is on rank 0" in hangs(((forward,), (Action(Op.FORWARD, 0, 1),)))


def test_clock_of_a_small_step() -> None:
    """Transfers, unequal stages and the tail land on the second that a hand count gives."""
    program = build_program("gpipe", num_ranks=2, num_microbatches=2)
    costs = Costs(
        forward=[1.0, 2.0], backward=[2.0, 4.0], transfer=[5.0], reduce=[1.0, 3.0], clip=1.0, update=0.5
    )
    timeline = replay(program, costs=costs)
    ends = {(span.rank, str(span.action)): span.end for span in timeline.spans}
    assert ends[0, "F0.1"] == 2.0
    assert (ends[1, "R>1.0"], ends[1, "F1.0"]) == (6.0, 8.0)
    assert (ends[1, "R>1.1"], ends[1, "F1.1"]) == (11.0, 13.0)  # one message after the other on the link
    assert (ends[1, "B1.0"], ends[1, "B1.1"]) == (17.0, 21.0)
    assert (ends[0, "B0.0"], ends[0, "B0.1"]) == (24.0, 29.0)
    assert (ends[0, "reduce"], ends[1, "reduce"]) == (30.0, 24.0)
    assert ends[0, "clip"] == ends[1, "clip"] == 31.0
    assert timeline.seconds == 31.5
    assert timeline.bubble == pytest.approx(1 - (6 + 12 + 1 + 3 + 2 + 1) / (2 * 31.5))


def test_split_backward_costs() -> None:
    """Split backwards take half of a backward each, or what is given for them."""
    program = build_program("zero-bubble", num_ranks=2, num_microbatches=1, tail=False)
    halves = replay(program, costs=Costs(forward=1.0, backward=4.0))
    given = replay(program, costs=Costs(forward=1.0, backward=4.0, backward_input=3.0, backward_weight=9.0))
    assert (halves.seconds, given.seconds) == (8.0, 14.0)


def test_empty_program_takes_no_time() -> None:
    """A step without actions has no seconds, no live activations and no bubble."""
    timeline = replay(((), ()), costs=Costs(forward=1.0, backward=2.0))
    assert (timeline.seconds, timeline.peak_live, timeline.bubble) == (0.0, (0, 0), 0.0)
    assert draw(timeline) == "rank 0 |\nrank 1 |"


def test_measured_spans_make_a_timeline() -> None:
    """A timeline can be made of spans that were measured, with waits counted as idle."""
    rows = [
        [
            Span(rank=0, action=Action(Op.RECEIVE_ACTIVATION, 1, 0), start=0.0, end=1.0),
            Span(rank=0, action=Action(Op.FORWARD, 1, 0), start=1.0, end=4.0),
        ]
    ]
    timeline = summarize(rows)
    assert (timeline.seconds, timeline.peak_live, timeline.bubble) == (4.0, (1,), 0.25)
    assert str(timeline) == "4 s a step, bubble 25.0%, peak live activations a rank: 1"
    assert str(timeline.spans[1]) == "rank 0 F1.0 1..4 s"


def test_drawing_of_a_small_step() -> None:
    """A drawing shows each cell at its place and dots where a rank idles."""
    timeline = replay(built("zero-bubble", 1, 2, 4), costs=Costs(forward=1.0, backward=2.0))
    assert draw(timeline).splitlines() == [
        "rank 0 |F0 F1 ...B0--- F2 B1--- F3 B2--- B3---",
        "rank 1 |...F0 I0 W0 F1 I1 W1 F2 I2 F3 I3 W2 W3",
    ]


def test_drawings_keep_their_width() -> None:
    """A drawing is as wide as asked or narrower, and has one row for each rank."""
    for schedule, virtual in KINDS:
        timeline = replay(built(schedule, virtual, 8, 16), costs=Costs(forward=1.0, backward=2.0))
        rows = draw(timeline, width=80).splitlines()
        assert len(rows) == 8 and all(len(row) <= 80 + len("rank 0 |") for row in rows)


def test_short_forms_of_actions() -> None:
    """Actions print as letter, stage, microbatch and, past the first, segment."""
    shown = {
        "F1.3": Action(Op.FORWARD, 1, 3),
        "F1.3/2": Action(Op.FORWARD, 1, 3, 2),
        "S>1.3": Action(Op.SEND_ACTIVATION, 1, 3),
        "R<0.3": Action(Op.RECEIVE_GRADIENT, 0, 3),
        "C>1/0": Action(Op.COUPLE_FORWARD, 1),
        "clip": Action(Op.CLIP),
    }
    assert all(str(action) == text for text, action in shown.items())


def test_every_schedule_is_tested() -> None:
    """No schedule is left out of this file."""
    assert {schedule for schedule, _ in KINDS} == set(SCHEDULES)


def test_schedules_do_not_import_torch() -> None:
    """Programs are built and replayed without torch."""
    code = (
        "import sys, meshwise.schedule.replay, meshwise.schedule.library; assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )
