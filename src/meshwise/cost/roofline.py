"""Seconds of a unit on a device that is not here: FLOPs against what products reach, bytes against memory bandwidth.

Each kind of operation takes the longest of: its FLOPs at the reachable peak of its dtype, its bytes at the reachable
bandwidth, and the start of its kernels; these add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..hardware.cluster import Cluster, Device
from ..layout import Layout
from .blocks import checkpointed
from .estimate import GPU_RULES, Pricing
from .links import collective_seconds
from .profile import CellSeconds, Profile, UnitProfile, Work
from .sharding import labelled
from .stage import StageTable, UnitPrice

REACHED_BANDWIDTH = 0.85  # of the vendor's, by large elementwise kernels (Calculon's table: 0.75 at 10 MB, 0.90 at 100)
ATTENTION = 0.75  # what fused attention reaches of what products reach, forward (FlashAttention-2: 0.73 on A100)
ATTENTION_BACKWARD = 0.65  # and backward (FlashAttention-2: 0.63)
CONVOLUTION = 0.7  # convolutions of cuDNN beside products; typical
FALLBACK = {"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "fp8": ("bf16", "fp16"), "fp64": ("fp32",), "fp32": ()}


def peak_of(device: Device, dtype: str, kind: str) -> float:
    """Give the peak FLOP/s of a dtype; convolutions in fp32 run in tf32 where the device has it, as torch does."""
    if kind == "conv" and dtype == "fp32" and "tf32" in device.peak_flops:
        return device.peak_flops["tf32"]
    for name in (dtype, *FALLBACK.get(dtype, ())):
        if name in device.peak_flops:
            factor = 0.5 if dtype == "fp64" else 1.0
            return device.peak_flops[name] * factor
    return next(iter(device.peak_flops.values()))


def work_seconds(work: Work, device: Device, *, tp: int, sequence: bool) -> CellSeconds:
    """Give the seconds of one kind of operation in a unit; "uncounted" ones take what their bytes take."""
    share = tp if work.shard != "none" or sequence else 1
    rate = peak_of(device, work.dtype, work.kind) * device.reachable
    forward_rate = rate * {"attention": ATTENTION, "conv": CONVOLUTION}.get(work.kind, 1.0)
    backward_rate = rate * {"attention": ATTENTION_BACKWARD, "conv": CONVOLUTION}.get(work.kind, 1.0)
    bandwidth = device.bytes_per_second * REACHED_BANDWIDTH
    ahead = bool(work.forward_bytes or work.forward_flops)
    back = bool(work.backward_bytes or work.backward_input_flops or work.backward_weight_flops)
    starts = work.count * device.launch_seconds / ((1 if ahead else 0) + (2 if back else 0) or 1)
    forward = max(work.forward_flops / share / forward_rate, work.forward_bytes / share / bandwidth, starts * ahead)
    flops = work.backward_input_flops + work.backward_weight_flops
    backward = max(flops / share / backward_rate, work.backward_bytes / share / bandwidth, 2 * starts * back)
    weight = backward * (work.backward_weight_flops / flops if flops else 0.0)
    return CellSeconds(forward=forward, backward=backward, backward_input=backward - weight, backward_weight=weight)


def unit_prices(
    profile: Profile, cluster: Cluster, *, tp: int = 1, sequence: bool = False
) -> tuple[list[UnitPrice], tuple[str, ...]]:
    """Price all units; also say what is not counted."""
    known: dict[tuple[object, ...], UnitPrice] = {}
    prices = []
    for unit in profile.units:
        key = (unit.work, unit.tp_reduces, unit.tp_reduce_bytes)
        if key not in known:
            known[key] = _price(unit, cluster, tp, sequence)
        prices.append(known[key])
    return prices, uncounted_notes(profile)


def _price(unit: UnitProfile, cluster: Cluster, tp: int, sequence: bool) -> UnitPrice:
    parts = [work_seconds(w, cluster.device, tp=tp, sequence=sequence) for w in unit.work]
    seconds = CellSeconds(
        forward=sum(p.forward for p in parts),
        backward=sum(p.backward for p in parts),
        backward_input=sum(p.backward_input for p in parts),
        backward_weight=sum(p.backward_weight for p in parts),
    )
    told = 0.0
    if tp > 1 and unit.tp_reduces:
        told = unit.tp_reduces * collective_seconds(cluster, "all-reduce", unit.tp_reduce_bytes, size=tp)
    return UnitPrice(seconds=seconds, tensor_forward=told, tensor_backward=told)


def uncounted_notes(profile: Profile) -> tuple[str, ...]:
    """Say which operations nothing is known about."""
    if not profile.uncounted:
        return ()
    named = ", ".join(f"{name} ({count})" for name, count in sorted(profile.uncounted.items()))
    return (f"Not counted as work, only by their bytes: {named}.",)


def named_pricing(cluster: Cluster) -> Callable[[Profile, Layout], Pricing]:
    """Give the function that prices layouts on a cluster; what it has found for a profile and a tp it keeps."""
    known: dict[tuple[int, int, bool, bool], Pricing] = {}
    kept: list[Profile] = []  # so that no id is used twice

    def price(profile: Profile, layout: Layout) -> Pricing:
        key = (id(profile), layout.tp, layout.sequence, layout.recompute)
        if key not in known:
            kept.append(profile)
            known[key] = _pricing(profile, cluster, layout)
        return known[key]

    return price


def _pricing(profile: Profile, cluster: Cluster, layout: Layout) -> Pricing:
    parted = labelled(profile)
    prices, notes = unit_prices(parted.profile, cluster, tp=layout.tp, sequence=layout.sequence)
    shown: Sequence[str] = parted.notes if layout.tp > 1 else ()
    held = checkpointed(parted.profile) if layout.recompute else parted.profile
    table = StageTable(held, prices, tp=layout.tp, sequence=layout.sequence)
    rules = replace(GPU_RULES, keeps_partial_sums=False, blockwise=True)
    if cluster.device.kind == "cpu":
        rules = replace(rules, runtime_bytes=64 * 2**20)  # libraries and the program; see CPU_RULES
    return Pricing(table=table, rules=rules, notes=(*notes, *shown))
