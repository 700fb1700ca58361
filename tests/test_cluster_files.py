"""Clusters as JSON and the last probe in the user's cache: what is written is read, what is wrong is named."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwise.errors import JobError
from meshwise.hardware.cluster import Cluster, Device, Level, Link, Measured
from meshwise.hardware.files import cluster_from_json, cluster_to_json, read_cluster, write_cluster
from meshwise.hardware.named import named_cluster
from meshwise.hardware.remembered import cache_folder, host_facts, processor_name, remember, remembered

CLUSTER = Cluster(
    name="2x2x test",
    device=Device(
        name="a device",
        kind="gpu",
        memory_bytes=80e9,
        peak_flops={"fp32": 1e13, "bf16": 1e14},
        reachable=0.7,
        bytes_per_second=2e12,
        launch_seconds=4e-6,
        sources={"peak_flops": "its data sheet"},
    ),
    levels=(
        Level(size=2, link=Link(name="near", latency_seconds=1e-6, bytes_per_second=2e11, source="its data sheet")),
        Level(size=2, link=Link(name="far", latency_seconds=1e-5, bytes_per_second=2e10, source="measured")),
    ),
    overlap_slowdown=1.2,
    measured=(Measured(kind="message", group=2, points=((1024.0, 1e-5), (1048576.0, 1e-4))),),
    is_here=True,
    sources={"measured": "somewhere"},
)


# ---- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [CLUSTER, named_cluster("4x8xH100"), named_cluster("2xcpu")], ids=lambda c: c.name)
def test_a_cluster_read_from_its_file_is_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """Whatever was measured or named is read back equal, all tables and sources too."""
    write_cluster(cluster, tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster


def test_memory_without_a_limit_is_null_in_strict_json() -> None:
    """Infinity, which JSON does not have, goes out as null and comes back."""
    endless = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=math.inf))
    text = json.dumps(cluster_to_json(endless), allow_nan=False)
    assert cluster_from_json(json.loads(text)) == endless


def test_what_has_a_default_may_be_left_out() -> None:
    """A cluster written by hand needs no tables, no sources, no slowdown."""
    facts = cluster_to_json(CLUSTER)
    for key in ("overlap_slowdown", "measured", "is_here", "sources"):
        del facts[key]
    del facts["device"]["launch_seconds"], facts["device"]["sources"]
    found = cluster_from_json(facts)
    assert found.overlap_slowdown == 1.0 and not found.measured and not found.is_here
    assert found.device.launch_seconds == 5e-6


WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("name",), None, "name must be text"),
    (("device", "kind"), "tpu", 'device.kind must be "cpu" or "gpu", not "tpu"'),
    (("device", "memory_bytes"), "80GB", "device.memory_bytes must be a number above 0"),
    (("device", "memory_bytes"), 0, "device.memory_bytes must be a number above 0"),
    (("device", "peak_flops"), {}, "device.peak_flops must be an object"),
    (("device", "peak_flops"), {"fp32": "fast"}, "device.peak_flops must be an object"),
    (("device", "reachable"), 70, "device.reachable must be a number above 0 and of at most 1"),
    (("device", "bytes_per_second"), math.nan, "device.bytes_per_second must be a number above 0"),
    (("device", "sources"), ["x"], "device.sources must be an object of texts"),
    (("device", "speed"), 1, "device.speed is not known; device has name, kind, "),
    (("device",), [], "device must be an object"),
    (("levels",), [], "levels must be a list of at least 1"),
    (("levels", 1, "size"), 2.5, "levels[1].size must be a whole number of at least 1"),
    (("levels", 1, "link", "bytes_per_second"), -1, "levels[1].link.bytes_per_second must be a number above 0"),
    (("levels", 0, "link", "latency_seconds"), True, "levels[0].link.latency_seconds must be a number of at least 0"),
    (("measured", 0, "points"), [], "measured[0].points must be pairs"),
    (("measured", 0, "points"), [[2048, 1e-5], [1024, 1e-4]], "measured[0].points must be pairs"),
    (("measured", 0, "group"), 0, "measured[0].group must be a whole number"),
    (("overlap_slowdown",), 0.5, "overlap_slowdown must be a number of at least 1"),
    (("is_here",), "yes", "is_here must be true or false"),
    (("nodes",), 4, "nodes is not known; a cluster has name, device, levels"),
]


@pytest.mark.parametrize(("place", "value", "says"), WRONG, ids=[w[2][:45] for w in WRONG])
def test_what_is_wrong_is_named_by_its_place(place: tuple[Any, ...], value: Any, says: str) -> None:
    """A value that cannot be is refused with its place, what it must be, and what it is."""
    facts = _set(cluster_to_json(CLUSTER), place, value)
    with pytest.raises(JobError) as error:
        cluster_from_json(facts)
    assert str(error.value).startswith(says)


NEEDED = [
    ("name",),
    ("device",),
    ("levels",),
    ("device", "kind"),
    ("device", "memory_bytes"),
    ("device", "peak_flops"),
    ("levels", 0, "link"),
    ("levels", 1, "link", "source"),
    ("measured", 0, "points"),
]


@pytest.mark.parametrize("place", NEEDED, ids=str)
def test_what_is_missing_is_named_by_its_place(place: tuple[Any, ...]) -> None:
    """A key that a cluster needs and lacks is named, and where an example comes from."""
    facts = json.loads(json.dumps(cluster_to_json(CLUSTER)))
    holder = facts
    for step in place[:-1]:
        holder = holder[step]
    del holder[place[-1]]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    with pytest.raises(JobError) as error:
        cluster_from_json(facts)
    assert str(error.value).startswith(f"{where} is missing") and "meshwise probe --json" in str(error.value)


def _set(facts: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    facts = json.loads(json.dumps(copy.deepcopy(facts)))
    holder: Any = facts
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    return facts


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", "null", "{}", "\x00"], ids=repr)
def test_a_file_that_is_no_cluster_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """Whatever a file holds, the error is ours and names the file."""
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(JobError, match=r"cluster\.json"):
        read_cluster(path)


def test_a_file_that_cannot_be_read_or_written_is_refused_by_name(tmp_path: Path) -> None:
    """A missing file and a missing folder are the user's to mend, so they are named."""
    with pytest.raises(JobError, match="none.json cannot be read"):
        read_cluster(tmp_path / "none.json")
    with pytest.raises(JobError, match="none.json cannot be written"):
        write_cluster(CLUSTER, tmp_path / "no" / "none.json")


# ---- the last probe ------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep probes in a folder of the test's own."""
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_probe_is_remembered_under_its_key_alone(cache: Path) -> None:
    """The last one kept under a key is given, and none under another key."""
    assert remembered("a") is None
    assert remember("a", CLUSTER) and remember("a", replace(CLUSTER, name="later"))
    assert remembered("a") == replace(CLUSTER, name="later")
    assert remembered("b") is None
    assert len(list(cache.iterdir())) == 1  # nothing half-written is left


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"key": "a"}', '{"key": "a", "cluster": {"name": 3}}', "\xff"]
)
def test_a_broken_cache_file_is_as_none(cache: Path, text: str) -> None:
    """Whatever the file holds, nothing is remembered, nothing is raised, and it can be written anew."""
    remember("a", CLUSTER)
    (file,) = cache.iterdir()
    file.write_text(text, encoding="latin-1")
    assert remembered("a") is None
    assert remember("a", CLUSTER) and remembered("a") == CLUSTER


def test_a_file_of_another_key_is_not_taken(cache: Path) -> None:
    """The key in the file counts, not its name alone."""
    remember("a", CLUSTER)
    (file,) = cache.iterdir()
    file.write_text(json.dumps({"key": "b", "cluster": cluster_to_json(CLUSTER)}))
    assert remembered("a") is None


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a folder cannot be made, remembering says so and forgets."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / "file" / "folder"))
    assert not remember("a", CLUSTER)
    assert remembered("a") is None


def test_a_write_that_fails_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the memory of the probe and no more."""

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not remember("a", CLUSTER)
    assert not list(cache.iterdir())


def test_the_cache_is_in_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MESHWISE_CACHE goes first, then XDG_CACHE_HOME where it is absolute, then ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MESHWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "meshwise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "meshwise"
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no home, nothing is kept and nothing is raised."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MESHWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(homeless))
    assert not remember("a", CLUSTER) and remembered("a") is None


def test_a_quota_of_cores_is_a_fact_of_the_host(tmp_path: Path) -> None:
    """A container with less of the processor's time is another machine to a probe."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU\nmodel name\t: Some CPU\n")
    free = host_facts(tmp_path)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    assert free != host_facts(tmp_path) and "150000 100000" in host_facts(tmp_path)
    assert processor_name(tmp_path) == "Some CPU"
