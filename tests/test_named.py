"""Clusters by name: what is read, what is refused, and that each figure says where it comes from."""

from __future__ import annotations

import pytest

from meshwise.errors import JobError
from meshwise.hardware.files import cluster_from_json, cluster_to_json
from meshwise.hardware.named import DEVICE_FIELDS, device_table, find_device, named_cluster


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("H100", [1]), ("8xH100", [8]), ("16xH100", [8, 2]), ("4x8xA100-80GB", [8, 4]), ("2048x8xH100", [8, 2048])],
)
def test_nodes_and_devices_are_read(text: str, sizes: list[int]) -> None:
    assert [level.size for level in named_cluster(text).levels] == sizes


def test_cpus_of_one_host_are_a_cluster() -> None:
    cluster = named_cluster("2xcpu")
    assert cluster.device.kind == "cpu" and cluster.num_devices == 2 and cluster.overlap_slowdown == 1.0


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(JobError, match=r"no device 'H10O' is known\. Did you mean H100-SXM-80GB"):
        named_cluster("8xH10O")


@pytest.mark.parametrize("text", ["0x8xH100", "2x2x8xH100", "12xH100"])
def test_numbers_that_make_no_cluster_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="cluster"):
        named_cluster(text)


def test_every_figure_of_every_device_has_a_source() -> None:
    for facts in device_table().values():
        for name in set(DEVICE_FIELDS) - {"kind", "sources"}:
            assert name not in facts or facts["sources"].get(name), (facts["name"], name)
        assert facts["node_link"]["source"] and facts["network"]["source"]


def test_reachable_shares_and_bandwidths_are_below_what_vendors_state() -> None:
    for facts in device_table().values():
        assert 0.3 < facts["reachable"] <= 1.0
        assert facts["node_link"]["bytes_per_second"] >= facts["network"]["bytes_per_second"]


def test_short_names_stand_for_the_usual_device() -> None:
    assert find_device("a100")["name"] == "A100-SXM-80GB" and find_device("rtx 4090")["name"] == "RTX-4090-24GB"


def test_a_named_cluster_survives_json() -> None:
    cluster = named_cluster("2x8xH100")
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
