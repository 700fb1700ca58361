"""Probing this machine: what is measured is there, makes sense, and is the same on all ranks. No times are judged."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise import probing
from meshwise.errors import LayoutError
from meshwise.hardware import probe as measuring
from meshwise.hardware.cluster import Cluster, Measured
from meshwise.hardware.files import cluster_from_json, cluster_to_json
from meshwise.hardware.remembered import remember
from meshwise.launch.local import run_ranks
from meshwise.parallel.reduce import Reducer
from meshwise.parallel.shared_reduce import SharedReducer
from meshwise.probing import describe, machine_key, probe, probe_rank, probed, probed_among_ranks

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")
SETTINGS = ("QUICK_SIZES", "FULL_SIZES", "SIDES", "STREAM_BYTES", "OVERLAP_BYTES", "COMPUTE_SECONDS", "LINK_SECONDS")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep probes in a folder of the test's own."""
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def few(sizes: Sequence[int] = (1024, 65536)) -> None:
    """Measure few sizes for a short time, in this process (a rank's own)."""
    measuring.QUICK_SIZES = measuring.FULL_SIZES = tuple(sizes)
    measuring.SIDES, measuring.STREAM_BYTES = {"cpu": (64, 96)}, {"cpu": 1 << 16}
    measuring.OVERLAP_BYTES = 1 << 16
    measuring.COMPUTE_SECONDS = measuring.LINK_SECONDS = {True: 0.003, False: 0.003}


def in_ranks(count: int, *, quick: bool, variables: Callable[[int], dict[str, str]] = lambda rank: {}) -> list[Cluster]:
    """Probe in some ranks, each with environment variables of its own; give what each of them got."""

    def job(context: Any) -> Cluster:
        few()
        os.environ.update(variables(context.rank))
        return probe_rank(context.device, quick=quick)

    return run_ranks(job, count, device="cpu", timeout=100)


def check(cluster: Cluster, count: int) -> None:
    """See that all that must be positive is, and that no table has a larger message take less time."""
    device = cluster.device
    assert cluster.num_devices == count and cluster.is_here and cluster.overlap_slowdown >= 1
    assert device.kind == "cpu" and device.memory_bytes > 0 and 0 < device.reachable <= 1
    assert device.bytes_per_second > 0 and device.launch_seconds > 0
    assert device.peak_flops["fp32"] > 0 and min(device.peak_flops.values()) > 0
    assert all(level.link.latency_seconds >= 0 and level.link.bytes_per_second > 0 for level in cluster.levels)
    for table in cluster.measured:
        assert 2 <= table.group <= count and table.points
        assert all(math.isfinite(s) and s > 0 for _, s in table.points)
        pairs = list(itertools.pairwise(table.points))
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairs), table
    figures = {"peak_flops", "reachable", "bytes_per_second", "launch_seconds", "memory_bytes"}
    assert figures <= set(device.sources) and {"measured", "overlap_slowdown"} <= set(cluster.sources)
    assert torch.__version__ in device.sources["peak_flops"]
    assert cluster_from_json(cluster_to_json(cluster)) == cluster


def kinds(cluster: Cluster) -> set[tuple[str, int]]:
    """List which operations were measured in groups of how many."""
    return {(table.kind, table.group) for table in cluster.measured}


# ---- one device and two ------------------------------------------------------------------------------------


def test_one_device_has_speeds_and_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is alone probes itself: it computes, and talks to nobody."""
    for name in SETTINGS:
        monkeypatch.setattr(measuring, name, getattr(measuring, name))
    few()
    cluster = probe_rank(CPU, quick=True)
    check(cluster, 1)
    assert not cluster.measured and len(cluster.levels) == 1


def test_a_quick_probe_of_two_devices_has_what_planning_needs() -> None:
    """Messages, their sender's part and the exchange of gradients; the sender's part is never more than the whole."""
    cluster = probe(2, quick=True)
    check(cluster, 2)
    assert kinds(cluster) == {("message", 2), ("send", 2), ("exchange", 2)}
    message, send = cluster.table("message", 2), cluster.table("send", 2)
    assert message is not None and send is not None
    assert [b for b, _ in message.points] == [b for b, _ in send.points]
    assert all(part <= whole for (_, whole), (_, part) in zip(message.points, send.points, strict=True))
    assert ", quick" in cluster.sources["measured"]
    assert "nothing runs beside" in cluster.sources["overlap_slowdown"]


def test_a_probe_needs_a_device() -> None:
    """No devices are refused before anything starts."""
    with pytest.raises(LayoutError, match="devices=0"):
        probe(0)


# ---- every rank the same -----------------------------------------------------------------------------------


def test_a_full_probe_measures_groups_and_collectives_and_tells_all_ranks_the_same() -> None:
    """Three ranks: exchanges and collectives of the first two and of all, in every dtype that the device has."""
    clusters = in_ranks(3, quick=False)
    assert clusters[0] == clusters[1] == clusters[2]
    check(clusters[0], 3)
    grouped = itertools.product(("exchange", *measuring.COLLECTIVES), (2, 3))
    assert kinds(clusters[0]) == {("message", 2), ("send", 2), *grouped}
    assert {"fp32", "bf16"} <= set(clusters[0].device.peak_flops)


def test_the_process_group_is_measured_where_memory_is_not_shared() -> None:
    """With gloo the same tables come from messages, and computing beside its all-reduce is measured."""
    clusters = in_ranks(3, quick=False, variables=lambda rank: {"MESHWISE_TRANSPORT": "gloo"})
    assert clusters[0] == clusters[1] == clusters[2]
    check(clusters[0], 3)
    assert {("message", 2), ("exchange", 2), ("exchange", 3)} <= kinds(clusters[0])
    assert "all-reduce" in clusters[0].sources["overlap_slowdown"]


def test_hosts_are_levels() -> None:
    """Four ranks on two hosts: a level of ranks and a level of hosts, each with its own link."""
    (cluster, *others) = in_ranks(4, quick=True, variables=lambda rank: {"MESHWISE_HOST": f"host{rank // 2}"})
    assert all(other == cluster for other in others)
    check(cluster, 4)
    assert [(level.size, level.link.name) for level in cluster.levels] == [
        (2, "between ranks of a host"),
        (2, "between hosts"),
    ]
    assert ("exchange", 4) in kinds(cluster)


def test_hosts_with_a_rank_each_are_one_level() -> None:
    """Where every rank is on a host of its own, the network between hosts is the only link."""
    clusters = in_ranks(2, quick=True, variables=lambda rank: {"MESHWISE_HOST": f"host{rank}"})
    assert clusters[0] == clusters[1]
    check(clusters[0], 2)
    assert [(level.size, level.link.name) for level in clusters[0].levels] == [(2, "between hosts")]


def test_ranks_that_run_probe_once_and_then_remember() -> None:
    """What the first call measures, the second looks up: on all ranks the same, but for the memory that is free."""

    def job(context: Any) -> tuple[Cluster, Cluster]:
        few()
        first = probed_among_ranks(context.device)
        measuring.measure_speed = None  # type: ignore[assignment]
        return first, probed_among_ranks(context.device)

    pairs = run_ranks(job, 2, device="cpu", timeout=100)
    assert pairs[0] == pairs[1]
    first, second = pairs[0]
    assert (first.measured, first.device.peak_flops) == (second.measured, second.device.peak_flops)


@pytest.mark.parametrize(("way", "called"), [("shared", "fold"), ("gloo", "finish")])
def test_an_exchange_is_the_one_that_training_makes(way: str, called: str) -> None:
    """What is timed is the runtime's own reduction, and every replica has the sum of all in the end."""

    def job(context: Any) -> list[set[float]]:
        few((16384,))
        os.environ["MESHWISE_TRANSPORT"] = way
        kind: Any = {"fold": SharedReducer, "finish": Reducer}[called]
        own, sums = getattr(kind, called), []

        def noted(*args: Any) -> Any:
            found = yield from own(*args)
            sums.append(set((found if called == "fold" else found[0][0]).flatten().tolist()))
            return found

        setattr(kind, called, noted)
        probe_rank(context.device, quick=True)
        return sums

    for sums in run_ranks(job, 3, device="cpu", timeout=100):
        assert sums and all(found == {3.0} for found in sums)


# ---- what is remembered --------------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Let one device be probed already."""
    for name in SETTINGS:
        monkeypatch.setattr(measuring, name, getattr(measuring, name))
    few()
    cluster = probe_rank(CPU, quick=True)
    remember(machine_key(1, 1), cluster)
    return cluster


def test_a_machine_that_was_probed_is_not_probed_again(known: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remembered figures are given, with the memory of now."""
    monkeypatch.setattr(probing, "probe", None)
    found = probed(1)
    assert found.device.peak_flops == known.device.peak_flops
    assert found.device.memory_bytes > 0


def test_a_key_names_what_a_probe_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices, threads, hosts, torch, the way ranks talk and the processor's quota each make another key."""
    keys = {machine_key(1, 1), machine_key(2, 1), machine_key(1, 2), machine_key(2, 1, hosts=2)}
    with monkeypatch.context() as patch:
        patch.setenv("MESHWISE_TRANSPORT", "gloo")
        keys.add(machine_key(1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.0")
        keys.add(machine_key(1, 1))
    monkeypatch.setattr(probing, "host_facts", lambda: ("another host",))
    keys.add(machine_key(1, 1))
    assert len(keys) == 7


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_a_probe_leaves_no_shared_memory_to_the_job() -> None:
    """Ranks that go on after a probe hold none of its segments."""

    def job(context: Any) -> int:
        few()
        probe_rank(context.device, quick=True)
        return Path("/proc/self/maps").read_text().count("memfd")

    assert run_ranks(job, 2, device="cpu", timeout=100) == [0, 0]


# ---- how it is measured ----------------------------------------------------------------------------------------


def test_a_dtype_that_the_device_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that cannot be had is not an error, and not a figure."""
    multiply = torch.mm

    def lacking(a: Any, b: Any, out: Any) -> Any:
        if a.dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", lacking)
    monkeypatch.setattr(measuring, "SIDES", {"cpu": (64,)})
    monkeypatch.setattr(measuring, "STREAM_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(measuring, "COMPUTE_SECONDS", {False: 0.003})
    speed = measuring.measure_speed(CPU, quick=False)
    assert set(speed.flops) == {"fp32", "bf16"}


def test_the_jobs_precision_of_products_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fp32 are measured as such, and the user's setting is there again afterwards."""
    before, seen = torch.get_float32_matmul_precision(), []
    torch.set_float32_matmul_precision("medium")

    def note(*args: Any, **options: Any) -> float:
        seen.append(torch.get_float32_matmul_precision())
        return 1.0

    try:
        monkeypatch.setattr(measuring, "timed", note)
        measuring._product(CPU, "fp32", 8, 0.0)
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as if all ranks said the same."""
    monkeypatch.setattr(measuring, "_agree", lambda values: values)


def seconds_of(table: dict[int, float]) -> Callable[[int], measuring.Round]:
    """Pretend an operation whose rounds take what a table says."""
    return lambda size: lambda: (table[size],)


@pytest.mark.usefixtures("alone")
def test_a_size_that_would_take_too_long_is_left_out() -> None:
    """After a size of an eighth of a second the next larger one is not tried."""
    asked = []

    def prepare(size: int) -> measuring.Round:
        asked.append(size)
        return lambda: (size / 1000,)

    (points,) = measuring._measure(prepare, (1, 10, 100, 200, 400), 0.001)
    assert points == ((1.0, 0.001), (10.0, 0.01), (100.0, 0.1), (200.0, 0.2))
    assert 400 not in asked and asked.count(200) == 1 and asked.count(1) == measuring.TURNS


@pytest.mark.usefixtures("alone")
def test_noise_does_not_make_a_small_message_dearer_than_a_large_one() -> None:
    """What took a larger size bounds what takes a smaller one."""
    (points,) = measuring._measure(seconds_of({1: 3e-4, 2: 1e-4, 4: 2e-4}), (1, 2, 4), 0.0)
    assert points == ((1.0, 1e-4), (2.0, 1e-4), (4.0, 2e-4))


@pytest.mark.usefixtures("alone")
def test_the_first_rounds_are_thrown_away_and_the_quietest_turn_counts() -> None:
    """A cold start is not in the table, nor is a moment in which something else ran."""
    rounds = itertools.chain([9e-3] * 2, [5e-3] * 3, [9e-3] * 2, [1e-3] * 3, itertools.repeat(4e-3))
    (points,) = measuring._measure(lambda size: lambda: (next(rounds),), (1,), 0.0)
    assert points == ((1.0, 1e-3),)


@pytest.mark.usefixtures("alone")
def test_what_a_backend_lacks_has_no_table() -> None:
    """An operation that cannot be had ends its table where it fails."""
    assert measuring._measure(seconds_of({1: math.inf}), (1, 2), 0.0) == [()]
    (points,) = measuring._measure(seconds_of({1: 1e-3, 2: math.inf}), (1, 2), 0.0)
    assert points == ((1.0, 1e-3),)


# ---- to read -----------------------------------------------------------------------------------------------


def test_a_description_shows_every_table_link_and_source(known: Cluster) -> None:
    """All figures stand in lines that a terminal can show, with where they come from."""
    sizes = [(float(size), 1e-5) for size in measuring.FULL_SIZES]
    tables = (
        Measured(kind="message", group=2, points=tuple(sizes)),
        Measured(kind="all-reduce", group=2, points=tuple(sizes[:1])),
    )
    (level,) = known.levels
    two = replace(known, levels=(replace(level, size=2),), measured=tables)
    text = describe(two)
    assert "message, one way, 2 ranks" in text and "all-reduce, 2 ranks" in text and "10.0 us" in text
    assert "one device" in text and two.sources["overlap_slowdown"] in text
    assert known.device.sources["memory_bytes"] in text and "matrix products fp32" in text
    assert describe(known).count("\n") < text.count("\n")
