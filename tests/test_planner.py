"""The planner: the best cut, the search over layouts, and what it says about them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from meshwise.cost.estimate import CPU_RULES, Pricing, Workload, measured_prices
from meshwise.cost.profile import CellSeconds, ParameterProfile, Profile, UnitProfile
from meshwise.cost.stage import StageTable
from meshwise.grid import microbatch_sizes
from meshwise.hardware.cluster import Cluster, Device, Level, Link
from meshwise.layout import Layout
from meshwise.planner.advice import advise
from meshwise.planner.search import Task, consider, search
from meshwise.planner.space import Space, layouts
from meshwise.planner.stages import best_cuts

MIB = float(1 << 20)
HERE = Cluster(
    name="here",
    device=Device(
        name="core", kind="cpu", memory_bytes=8e9, peak_flops={"fp32": 5e10}, reachable=1.0, bytes_per_second=1e10
    ),
    levels=(Level(size=4, link=Link(name="shared memory", latency_seconds=2e-5, bytes_per_second=5e9, source="")),),
    is_here=True,
)


def make_profile(seconds: list[float], *, weights: list[float] | None = None, handed: float = 1e4) -> Profile:
    """Make a profile of a chain of units with these forward seconds and parameter bytes."""
    weights = weights or [1 * MIB] * len(seconds)
    units = tuple(
        UnitProfile(
            name=f"layer{i}",
            params=(f"layer{i}.weight",),
            seconds=CellSeconds(forward=s, backward=2 * s, backward_input=s, backward_weight=s),
            saved_bytes=2 * MIB,
            forward_peak_bytes=3 * MIB,
            backward_peak_bytes=2 * MIB,
            boundary_bytes=handed,
            boundary_grad_bytes=handed,
        )
        for i, s in enumerate(seconds)
    )
    parameters = {
        f"layer{i}.weight": ParameterProfile(
            name=f"layer{i}.weight", num_elements=int(w / 4), num_bytes=int(w), optimizer_bytes=int(2 * w)
        )
        for i, w in enumerate(weights)
    }
    return Profile(microbatch_size=4, units=units, parameters=parameters, batch_bytes=1e4, update_seconds=1e-4)


def make_task(profile: Profile, *, devices: int = 2, batch: int = 32, limit: float | None = None) -> Task:
    workload = Workload(batch_size=batch, num_microbatches=len(microbatch_sizes(batch, profile.microbatch_size)))
    pricing = Pricing(table=StageTable(profile, measured_prices(profile)), rules=CPU_RULES)
    return Task(
        profiles=[profile],
        workloads=[workload],
        cluster=HERE,
        num_devices=devices,
        price=lambda p, layout: pricing,
        limit_bytes=limit,
    )


def largest(costs: list[float], cuts: tuple[int, ...]) -> float:
    """Give the cost of the costliest run."""
    edges = [0, *cuts, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))


# ---- cuts ------------------------------------------------------------------------------------------------


def test_b092_the_cut_is_by_cost_not_by_count() -> None:
    """Costs 2,1,1,1,1,2 on 4 stages give 2 | 1+1 | 1+1 | 2; eight equal layers on 3 stages give at most 3."""
    assert best_cuts([2, 1, 1, 1, 1, 2], 4) == (1, 3, 5)
    cuts = best_cuts([1.0] * 8, 3)
    assert cuts is not None and largest([1.0] * 8, cuts) == 3


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_better_than_the_one_that_is_chosen(seed: int) -> None:
    """On small problems all cuts are tried: with costs of handing on, and with stages that do not fit."""
    draw = random.Random(seed)
    count, stages = draw.randint(2, 9), draw.randint(1, 5)
    costs = [float(draw.randint(1, 9)) for _ in range(count)]
    handed = [draw.choice([0.0, 0.5, 3.0]) for _ in range(count)]
    sizes = [draw.randint(1, 5) for _ in range(count)]
    room = [draw.randint(5, 14) for _ in range(stages)] if seed % 2 else [100] * stages

    def fits(stage: int, first: int, last: int) -> bool:
        return sum(sizes[first:last]) <= room[stage]

    def slowest(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, count]
        border = [0.0, *handed]
        border[count] = 0.0
        parts = list(itertools.pairwise(edges))
        if any(not fits(k, a, b) for k, (a, b) in enumerate(parts)):
            return float("inf")
        return max(sum(costs[a:b]) + border[a] + border[b] for a, b in parts)

    every = [c for c in itertools.combinations(range(1, count), stages - 1)] if stages <= count else []
    least = min(map(slowest, every), default=float("inf"))
    found = best_cuts(costs, stages, handed=handed, fits=fits)
    assert (found is None) == (least == float("inf"))
    if found is not None:
        assert slowest(found) == least


# ---- search ------------------------------------------------------------------------------------------------


def test_every_layout_multiplies_to_the_devices() -> None:
    """The space holds each dp x pp once for every schedule, and nothing that cannot be run."""
    found = list(layouts(4, HERE, Space(recompute=False)))
    assert len(found) == len(set(found))
    assert {(x.dp, x.pp) for x in found} == {(4, 1), (2, 2), (1, 4)}
    assert all(x.tp == 1 and x.zero == 0 for x in found)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_trying_everything_finds(seed: int) -> None:
    """No layout with no cut at all is predicted to be faster than the first candidate."""
    draw = random.Random(seed)
    profile = make_profile([draw.choice([1e-3, 2e-3, 5e-3]) for _ in range(6)])
    task = make_task(profile, devices=2)
    space = Space(recompute=False)
    best = search(task, space).candidates[0].estimate.seconds
    for layout in layouts(2, HERE, space):
        for cuts in itertools.combinations(range(1, 6), layout.num_stages - 1):
            fixed = replace(task, fixed_cuts=lambda stages, cuts=cuts: cuts)
            tried = consider(fixed, profile, task.workloads[0], layout)
            assert tried.estimate.seconds >= best * (1 - 1e-9)


def test_the_same_input_gives_the_same_plan() -> None:
    """Search and advice are functions of their input alone."""
    profile = make_profile([1e-3, 4e-3, 2e-3, 2e-3, 1e-3, 3e-3])
    task = make_task(profile, devices=4, limit=200 * MIB)
    one, two = search(task, Space()), search(task, Space())
    assert one == two
    assert advise(task, one, one.candidates[0]) == advise(task, two, two.candidates[0])


def test_a_layout_that_does_not_fit_keeps_its_numbers() -> None:
    """What memory rules out says how much it needs, of how much, where, and its largest part."""
    profile = make_profile([1e-3] * 4, weights=[40 * MIB] * 4)
    found = search(make_task(profile, limit=800 * MIB), Space(recompute=False))
    reasons = {r.layout: r.reason for r in found.rejected}
    assert "dp=2" in reasons
    assert "of 800 MiB on every rank" in reasons["dp=2"]
    assert all(c.estimate.peak_bytes <= 800 * MIB for c in found.candidates)
    assert {c.layout.pp for c in found.candidates} == {2}


def test_memory_moves_the_cut_where_the_fastest_one_does_not_fit() -> None:
    """A first unit with most parameters is left alone on its stage when both stages must fit."""
    profile = make_profile([1e-3] * 6, weights=[90 * MIB, *[2 * MIB] * 4, 60 * MIB])
    free = consider(make_task(profile), profile, make_task(profile).workloads[0], Layout(pp=2))
    tight = make_task(profile, limit=free.estimate.peak_bytes * 0.99)
    moved = consider(tight, profile, tight.workloads[0], Layout(pp=2))
    assert moved.estimate.peak_bytes <= tight.limit_bytes
    assert moved.cuts != free.cuts


def test_more_replicas_than_slots_are_refused_with_the_numbers() -> None:
    """A step of 2 microbatches cannot be shared by 4 replicas."""
    profile = make_profile([1e-3] * 2)
    found = search(make_task(profile, devices=4, batch=8), Space(recompute=False))
    assert any(r.layout == "dp=4" and "only 2 microbatches" in r.reason for r in found.rejected)


def test_a_model_that_cannot_be_cut_is_planned_as_replicas() -> None:
    """Why it cannot be cut is kept for every pipeline layout."""
    profile = make_profile([1e-3] * 4)
    task = replace(make_task(profile), blocked="a branch on a value")
    found = search(task, Space(recompute=False))
    assert {str(c.layout) for c in found.candidates} == {"dp=2"}
    assert all("a branch on a value" in r.reason for r in found.rejected)


# ---- what an estimate says --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["dp=1", "dp=2", "pp=2", "pp=2,schedule=gpipe", "pp=2,schedule=zero-bubble", "dp=2,pp=2"]
)
def test_parts_of_a_step_add_up(text: str) -> None:
    """Time parts add up to the step, and memory parts to what is allocated."""
    profile = make_profile([1e-3, 4e-3, 2e-3, 2e-3])
    task = make_task(profile, devices=Layout.parse(text).num_devices)
    found = consider(task, profile, task.workloads[0], Layout.parse(text))
    assert sum(found.estimate.time_parts.values()) == pytest.approx(found.estimate.seconds)
    for rank in found.estimate.memory:
        assert sum(rank.parts.values()) == pytest.approx(rank.allocated)
        assert rank.reserved >= rank.parts["parameters"]


def test_the_bubble_is_that_of_the_replayed_program() -> None:
    """Equal stages of a pipeline of 2 with 8 microbatches wait 1/8 of what they compute, as drawn on paper."""
    profile = make_profile([1e-3, 1e-3], handed=0.0)
    task = make_task(profile)
    found = consider(task, profile, task.workloads[0], Layout(pp=2))
    parts = found.estimate.time_parts
    assert parts["bubble"] == pytest.approx(parts["compute"] / 8, rel=1e-6)


def test_advice_names_what_limits_and_how_sure_it_is() -> None:
    """The first sentence is the layout, the last how sure that is."""
    profile = make_profile([1e-3, 4e-3, 2e-3, 2e-3], weights=[100 * MIB, MIB, MIB, MIB])
    task = make_task(profile)
    found = search(task, Space(recompute=False))
    lines = advise(task, found, found.candidates[0])
    assert lines[0].startswith(f"Take {found.candidates[0].layout}")
    assert lines[-1].startswith("How sure:")
    assert any("of the parameters sit in \"layer0\"" in line for line in lines)
