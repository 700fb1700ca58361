"""Seconds of units on devices that are not here, what tp parts, and counts at other microbatch sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks.published.counting import counted
from benchmarks.published.language import Sizes

from meshwise.cost.casts import cast_once
from meshwise.cost.deepen import deepened
from meshwise.cost.kernels import product_share
from meshwise.cost.profile import ParameterProfile, Profile, UnitProfile, Work
from meshwise.cost.roofline import HOST, Software, price_layout, unit_prices, work_seconds
from meshwise.cost.scaling import at_microbatch
from meshwise.cost.sharding import labelled, stream_width, unit_kinds
from meshwise.hardware.named import named_cluster
from meshwise.layout import Layout

H100 = named_cluster("8xH100")
SMALL = Sizes(layers=3, hidden=256, heads=4, kv_heads=4, ffn=1024, seq=128, vocab=4096)
GATED = dataclasses.replace(
    SMALL, kv_heads=2, gated=True, bias=False, rms=True, learned_positions=False, tied=False, rotary=True
)
PLAIN = dataclasses.replace(SMALL, fused=False)


def test_a_large_product_reaches_almost_all_of_the_rate() -> None:
    assert product_share((1, 16384, 16384, 16384), 132, 7e14) > 0.95


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    whole = product_share((1, 132 * 256, 128, 4096), 132, 7e14)
    more = product_share((1, 133 * 256, 128, 4096), 132, 7e14)
    assert more < 0.7 * whole


def test_a_kernel_is_bound_by_flops_or_by_bytes() -> None:
    device = H100.device
    heavy = Work(op="mm", kind="matmul", dtype="bf16", count=1, forward_count=1, forward_flops=1e15, forward_bytes=1e6)
    wide = Work(op="add", kind="memory", dtype="bf16", count=1, forward_count=1, forward_bytes=1e12)
    found = [work_seconds(w, device, tp=1, sequence=False).forward for w in (heavy, wide)]
    assert found[0] == pytest.approx(1e15 / (989e12 * device.reachable), rel=0.01)
    assert found[1] > 1e12 / device.bytes_per_second


def test_small_kernels_wait_for_the_host() -> None:
    work = Work(op="add", kind="memory", count=10, forward_count=10, forward_bytes=1e4)
    profile = Profile(microbatch_size=1, units=(UnitProfile(name="a", work=(work,)),), parameters={})
    (price,), _ = unit_prices(profile, H100)
    assert price.seconds.forward == pytest.approx(10 * HOST)
    (compiled,), _ = unit_prices(profile, H100, software=Software(compiled=True))
    assert compiled.seconds.forward < price.seconds.forward / 10


def test_operations_nothing_is_known_about_are_told() -> None:
    profile = Profile(microbatch_size=1, units=(), parameters={}, uncounted={"my_kernel": 3})
    assert "my_kernel (3)" in unit_prices(profile, H100)[1][0]


@pytest.mark.parametrize("sizes", [SMALL, GATED, PLAIN], ids=["fused", "gated", "plain"])
def test_a_transformer_is_parted_by_column_and_row(sizes: Sizes) -> None:
    """What leaves the stream is parted by column, what leads back into it by row, with one sum each."""
    profile = counted(sizes, True)[0]
    width = stream_width(profile)
    kinds = dict(zip((u.name for u in profile.units), unit_kinds(profile, width or 0), strict=True))
    assert width == 256
    assert kinds["layers.1.attention.qkv"] == "column" == kinds["layers.1.feed_forward.up"]
    assert kinds["layers.1.attention.out"] == "row" == kinds["layers.1.feed_forward.down"]
    assert kinds["layers.1.norm1"] == "" and kinds["token"] == "vocab" == kinds["output"]
    layer = [u for u in labelled(profile).profile.units if u.name.startswith("layers.1.")]
    assert sum(u.tp_reduces for u in layer) == 2
    assert {u.tp_reduce_bytes for u in layer if u.tp_reduces} == {11 * 128 * 256 * 2.0}


def test_tp_parts_almost_all_parameters_of_a_transformer() -> None:
    parameters = labelled(counted(GATED, True)[0]).profile.parameters.values()
    assert sum(p.num_elements for p in parameters if p.tp_sharded) > 0.95 * sum(p.num_elements for p in parameters)


def test_a_model_without_a_stream_is_done_whole_and_says_so() -> None:
    names = {f"w{k}": (8 << k, 16 << k) for k in range(4)}
    parameters = {n: ParameterProfile(name=n, num_elements=1, num_bytes=4, shape=s) for n, s in names.items()}
    found = labelled(Profile(microbatch_size=1, units=(), parameters=parameters))
    assert "tp parts nothing" in found.notes[0] and not any(p.tp_sharded for p in found.profile.parameters.values())


def test_tp_and_sequence_sharding_divide_seconds_and_saved_bytes() -> None:
    big = dataclasses.replace(SMALL, hidden=4096, heads=32, kv_heads=32, ffn=16384, seq=2048)
    profile = counted(big, True)[0]
    one = price_layout(profile, H100, Layout()).table
    four = price_layout(profile, H100, Layout(tp=4, sequence=True)).table
    last = len(profile.units)
    assert 3 < one.stage(0, last).seconds.forward / four.stage(0, last).seconds.forward < 4.3
    assert one.held(0, last) / four.held(0, last) == pytest.approx(4, rel=0.1)
    assert four.stage(0, last).tensor_forward > 0


def test_counts_at_two_sizes_give_any_other() -> None:
    one, two = counted(SMALL, True)
    assert at_microbatch(one, two, 13).units == two.units
    half = at_microbatch(one, two, 12)
    for a, b, c in zip(one.units, half.units, two.units, strict=True):
        assert b.saved_bytes == pytest.approx((a.saved_bytes + c.saved_bytes) / 2)
        assert sum(w.forward_flops for w in b.work) * 2 == pytest.approx(
            sum(w.forward_flops for u in (a, c) for w in u.work)
        )


def test_a_deeper_model_is_like_one_that_was_counted_whole() -> None:
    few, many = counted(SMALL, True)[0], counted(dataclasses.replace(SMALL, layers=5), True)[0]
    with torch.device("meta"):
        from benchmarks.published.language import Language

        whole = sum(p.numel() for p in Language(dataclasses.replace(SMALL, layers=5)).parameters())
    assert many == deepened(few, "layers", 5) and sum(p.num_elements for p in many.parameters.values()) == whole


def test_weights_are_cast_once_a_step() -> None:
    count = 1024 * 1024
    copy = Work(op="_to_copy", kind="memory", count=2, forward_count=1, forward_bytes=6.0 * count + 100.0)
    unit = UnitProfile(name="a", params=("w",), work=(copy,), saved_bytes=2.0 * count + 50.0)
    weight = ParameterProfile(name="w", num_elements=count, num_bytes=4 * count, shape=(1024, 1024))
    found = cast_once(Profile(microbatch_size=1, units=(unit,), parameters={"w": weight}))
    assert found.units[0].saved_bytes == 50.0 and found.units[0].work[0].forward_bytes == 100.0
    assert found.parameters["w"].optimizer_bytes == 2 * count
