"""Messages and collectives on links: measured tables first, then latency and bandwidth by level."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwise.cost.links import collective_seconds, message_seconds, split_group
from meshwise.hardware.cluster import Measured
from meshwise.hardware.named import named_cluster

ONE, MANY = named_cluster("8xH100"), named_cluster("4x8xH100")
MIB = 2.0**20


def test_an_unknown_collective_raises() -> None:
    with pytest.raises(ValueError, match="nothing is known of the collective 'all-swap'"):
        collective_seconds(ONE, "all-swap", MIB, size=8)


def test_one_rank_or_nothing_costs_nothing() -> None:
    assert collective_seconds(ONE, "all-reduce", MIB, size=1) == 0.0 == collective_seconds(ONE, "all-reduce", 0, size=8)


def test_a_measured_table_goes_before_formulas() -> None:
    table = Measured(kind="all-reduce", group=8, points=((1.0, 0.25), (1e9, 0.25)))
    assert collective_seconds(replace(ONE, measured=(table,)), "all-reduce", MIB, size=8) == 0.25


def test_a_large_all_reduce_moves_twice_its_bytes_less_one_share() -> None:
    num_bytes = 2.0**32
    rate = ONE.levels[0].link.bytes_per_second
    assert collective_seconds(ONE, "all-reduce", num_bytes, size=8) == pytest.approx(1.75 * num_bytes / rate, rel=0.01)


def test_reduce_scatter_and_all_gather_make_an_all_reduce() -> None:
    whole = collective_seconds(ONE, "all-reduce", 2.0**32, size=8)
    halves = sum(collective_seconds(ONE, kind, 2.0**32, size=8) for kind in ("reduce-scatter", "all-gather"))
    assert halves == pytest.approx(whole, rel=0.01)


def test_members_that_are_a_node_apart_lie_on_nodes_of_their_own() -> None:
    assert split_group(MANY, 4, 8) == (1, 4)
    assert split_group(MANY, 8, 1) == (8, 1)
    assert split_group(MANY, 32, 1) == (8, 4)
    assert split_group(MANY, 8, 4) == (2, 4)


def test_between_nodes_only_a_share_of_the_bytes_is_sent() -> None:
    """A flat exchange over one network link each would take almost eight times as long."""
    num_bytes = 2.0**32
    far = MANY.levels[1].link.bytes_per_second
    apart = collective_seconds(MANY, "all-reduce", num_bytes, size=4, stride=8)
    hierarchical = collective_seconds(MANY, "all-reduce", num_bytes, size=32)
    assert apart == pytest.approx(1.5 * num_bytes / far, rel=0.01)
    assert hierarchical < apart / 3


def test_a_message_takes_the_link_of_the_level_that_holds_both() -> None:
    assert message_seconds(MANY, MIB, 6, 7) < message_seconds(MANY, MIB, 7, 8)


def test_more_bytes_never_take_less() -> None:
    for kind in ("all-reduce", "all-gather", "broadcast", "all-to-all"):
        times = [collective_seconds(MANY, kind, 4.0**k, size=32) for k in range(16)]
        assert times == sorted(times)
