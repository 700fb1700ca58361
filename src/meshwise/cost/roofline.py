"""Seconds of a unit on a device that is not here: kernel by kernel, and at least what starting them takes the host.

A kernel takes the longer of its FLOPs at the rate that its shape reaches and its bytes at the reached bandwidth, and a
start. The host starts kernels one by one and runs ahead of the device; in a layer whose kernels are shorter than
that, the device waits for the host::

    host    |a|b|c|d|e|                      device  |aaaa|bb|ccccc|d|e|      large: the sum of the kernels
    host    |  a  |  b  |  c  |              device   |a|   |b|   |c|         small: the number of operations
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..hardware.cluster import Cluster, Device
from ..layout import Layout
from .blocks import block_ranges, checkpointed
from .casts import cast_once
from .estimate import GPU_RULES, Pricing
from .exchange import beside
from .kernels import product_share
from .links import collective_seconds
from .profile import CellSeconds, Profile, UnitProfile, Work
from .sharding import Labelled, labelled
from .stage import StageTable, UnitPrice

REACHED_BANDWIDTH = 0.85  # of the vendor's, by large elementwise kernels (Calculon's table: 0.75 at 10 MB, 0.90 at 100)
# Seconds of the host for an operation that makes a value, with the views, modules and autograd nodes around it: each
# step of torch's dispatch takes 5 to 25 us, and about three go with one such operation. The one constant that was
# calibrated, on published runs of small models.
HOST = 5.0e-5
COMPILED_HOST = 0.2  # the share of it in a compiled graph
VECTOR = 0.85  # of the peak, by large fp32 products without tensor cores; typical, 0.8 to 0.95
ATTENTION = 0.6  # the share of products' rate that attention reaches where nothing is known of the device
ATTENTION_BACKWARD = 0.85  # what its backward reaches beside its forward (FlashAttention-2: 0.63 and 0.73 of A100)
MASKED_START, WHOLE_START = 450.0, 150.0  # queries at which half the rate is reached (FlashAttention-2, figures 4, 5)
WINOGRAD = 1.6  # fp32 convolutions of 3 x 3 need 2.25 times fewer products, and transforms (arXiv:1509.09308)
CONVOLUTION = 0.75  # what other convolutions reach beside products: their columns are gathered; typical of cuDNN
TRANSPOSES = 2.0  # times its bytes: cuDNN turns values to channels-last for tensor cores and back again
FALLBACK = {"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "fp8": ("bf16", "fp16"), "fp64": ("fp32",), "fp32": ()}
FP8_BYTES = 3.0  # times the bytes of a product in 16 bit, with the casts of its factors
TINY = 64.0  # bytes: an operation on less is none of the model's


@dataclass(frozen=True, kw_only=True)
class Software:
    """Say how a framework runs operations.

    ``host``: seconds of the host for an operation. ``compiled``: what streams is fused, and started from a compiled
    graph. ``tf32``: products of fp32 are made in tf32. ``fp8``: weights' products are made in
    fp8, their factors cast for each. ``channels_last``: images are held so. ``overlaps_tensor``: tp's
    collectives go in pieces beside products. ``attention``: its speed beside that of
    FlashAttention-2.
    """

    host: float = HOST
    compiled: bool = False
    tf32: bool = False
    fp8: bool = False
    channels_last: bool = False
    overlaps_tensor: bool = False
    attention: float = 1.0


EAGER = Software()


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Hold seconds of the device and of the host."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0


def peak_of(device: Device, dtype: str, kind: str, tf32: bool = False) -> float:
    """Give the peak FLOP/s of a dtype; convolutions in fp32 run in tf32 where the device has it, as torch does."""
    if dtype == "fp32" and "tf32" in device.peak_flops and (kind == "conv" or tf32):
        return device.peak_flops["tf32"]
    for name in (dtype, *FALLBACK.get(dtype, ())):
        if name in device.peak_flops:
            factor = 0.5 if dtype == "fp64" else 1.0
            return device.peak_flops[name] * factor
    return next(iter(device.peak_flops.values()))


def rate_of(work: Work, shape: tuple[int, ...], device: Device, software: Software) -> float:
    """Give the FLOP/s that one kind of operation reaches forward."""
    peak = peak_of(device, work.dtype, work.kind, software.tf32)
    tensor = peak > 2.5 * device.peak_flops.get("fp32", peak)
    reached = peak * (device.reachable if tensor or device.kind == "cpu" else max(VECTOR, device.reachable))
    if work.kind == "attention":
        return peak * software.attention * _attention_share(work, shape, device)
    if work.kind == "conv":
        area = shape[4] if len(shape) > 4 else 1
        reached *= WINOGRAD if area == 9 and not tensor else CONVOLUTION
    if not device.multiprocessors or len(shape) < 4:
        return reached
    return reached * product_share(shape[:4], device.multiprocessors, reached)


def _turned(work: Work, device: Device, software: Software) -> bool:
    """Tell convolutions on tensor cores, whose values are turned to channels-last and back."""
    if work.kind != "conv" or software.channels_last:
        return False
    peak = peak_of(device, work.dtype, work.kind, software.tf32)
    return peak > 2.5 * device.peak_flops.get("fp32", peak)


def _attention_share(work: Work, shape: tuple[int, ...], device: Device) -> float:
    """Give the share of the peak that fused attention reaches: less on short sequences, where blocks are few."""
    share = device.attention or ATTENTION * device.reachable
    if len(shape) < 4:
        return share
    number, queries, keys, size = shape[:4]
    whole = 4.0 * number * queries * keys * size * max(1, work.forward_count)
    masked = work.forward_flops < 0.75 * whole if work.forward_flops else True
    return share * queries / (queries + (MASKED_START if masked else WHOLE_START))


def parted_shape(work: Work, tp: int) -> tuple[int, ...]:
    """Give the shape of a product that tp divides: by its columns, by what it sums over, or by heads."""
    if tp == 1 or len(work.shape) < 4:
        return work.shape
    shape = list(work.shape)
    if work.shard == "heads":
        where = 0
    elif work.shard in ("column", "vocab", "row"):
        inward = work.shard == "row"
        if work.forward_flops:
            where = 3 if inward else 2
        elif work.backward_input_flops:
            where = 2 if inward else 3
        else:
            where = 2 if inward else 1
    else:
        where = 1
    shape[where] = max(1, shape[where] // tp)
    return tuple(shape)


def _in_fp8(work: Work) -> Work:
    """Give a product in fp8: both factors are read once more for their scale, and once to be cast."""
    if work.kind != "matmul" or work.dtype not in ("bf16", "fp16") or (work.shape and work.shape[0] > 1):
        return work
    return replace(
        work,
        dtype="fp8",
        forward_bytes=work.forward_bytes * FP8_BYTES,
        backward_bytes=work.backward_bytes * FP8_BYTES,
    )


def work_seconds(work: Work, device: Device, *, tp: int, sequence: bool, software: Software = EAGER) -> Spent:
    """Give the seconds of one kind of operation in a unit; "uncounted" ones take what their bytes take."""
    if work.forward_bytes + work.backward_bytes <= TINY * max(1, work.count):
        return Spent()
    work = _in_fp8(work) if software.fp8 and "fp8" in device.peak_flops else work
    share = tp if work.shard != "none" or sequence else 1
    ahead, back = work.forward_count, work.count - work.forward_count
    shape = parted_shape(work, tp if share > 1 else 1)
    rate = rate_of(work, shape, device, software)
    bandwidth = device.bytes_per_second * REACHED_BANDWIDTH

    def kernels(count: int, flops: float, num_bytes: float, rate: float) -> float:
        if not count:
            return 0.0
        turned = TRANSPOSES * num_bytes / share / bandwidth if _turned(work, device, software) else 0.0
        moved = num_bytes / share / bandwidth
        return max(flops / share / rate, moved) + turned + count * device.launch_seconds / 2

    flops = work.backward_input_flops + work.backward_weight_flops
    slower = ATTENTION_BACKWARD if work.kind == "attention" else 1.0
    backward = kernels(back, flops, work.backward_bytes, rate * slower)
    weight = backward * (work.backward_weight_flops / flops if flops else 0.0)
    host = software.host * (COMPILED_HOST if software.compiled else 1.0) if device.kind == "gpu" else 0.0
    return Spent(
        forward=kernels(ahead, work.forward_flops, work.forward_bytes, rate),
        backward_input=backward - weight,
        backward_weight=weight,
        host_forward=ahead * host,
        host_backward=back * host,
    )


def unit_prices(
    profile: Profile, cluster: Cluster, *, tp: int = 1, sequence: bool = False, software: Software = EAGER
) -> tuple[list[UnitPrice], tuple[str, ...]]:
    """Price all units; also say what is not counted."""
    known: dict[tuple[object, ...], Spent] = {}
    spent: list[Spent] = []
    for unit in profile.units:
        if unit.work not in known:
            known[unit.work] = _spent(unit, cluster.device, tp, sequence, software)
        spent.append(known[unit.work])
    prices: list[UnitPrice] = []
    for first, last in block_ranges(profile):
        seconds = _in_block(spent[first:last])
        for unit, cell in zip(profile.units[first:last], seconds, strict=True):
            told = _told(unit, cluster, tp)
            ahead, back = told, told
            if told and software.overlaps_tensor:
                ahead, back = (_shown(told, tp, s, cluster) for s in (cell.forward, cell.backward))
            prices.append(UnitPrice(seconds=cell, tensor_forward=ahead, tensor_backward=back))
    return prices, uncounted_notes(profile)


def _spent(unit: UnitProfile, device: Device, tp: int, sequence: bool, software: Software) -> Spent:
    works = list(_fused(unit.work) if software.compiled else unit.work)
    parts = [work_seconds(w, device, tp=tp, sequence=sequence, software=software) for w in works]
    return Spent(**{name: sum(getattr(p, name) for p in parts) for name in Spent.__slots__})


def _fused(work: Sequence[Work]) -> Iterator[Work]:
    """Put what streams in one kernel each way: it reads and writes what the largest of them does."""
    streams = [w for w in work if w.kind == "memory"]
    yield from (w for w in work if w.kind != "memory")
    if streams:
        yield replace(
            streams[0],
            count=2,
            forward_count=1,
            forward_bytes=max(w.forward_bytes / max(1, w.forward_count) for w in streams),
            backward_bytes=max(w.backward_bytes / max(1, w.count - w.forward_count) for w in streams),
        )


def _in_block(spent: Sequence[Spent]) -> list[CellSeconds]:
    """Give the seconds of a layer's units: the device's, or in proportion the host's where those are longer."""
    ahead = sum(s.forward for s in spent)
    back = sum(s.backward_input + s.backward_weight for s in spent)
    slow_ahead = max(1.0, sum(s.host_forward for s in spent) / ahead) if ahead else 1.0
    slow_back = max(1.0, sum(s.host_backward for s in spent) / back) if back else 1.0
    return [
        CellSeconds(
            forward=s.forward * slow_ahead,
            backward=(s.backward_input + s.backward_weight) * slow_back,
            backward_input=s.backward_input * slow_back,
            backward_weight=s.backward_weight * slow_back,
        )
        for s in spent
    ]


def _told(unit: UnitProfile, cluster: Cluster, tp: int) -> float:
    if tp == 1 or not unit.tp_reduces:
        return 0.0
    return unit.tp_reduces * collective_seconds(cluster, "all-reduce", unit.tp_reduce_bytes, size=tp)


def _shown(told: float, tp: int, computing: float, cluster: Cluster) -> float:
    """Give what a collective adds that goes in ``tp`` pieces beside the pieces of its product: the first one shows."""
    return beside(cluster, told, computing, least=told / tp)


def uncounted_notes(profile: Profile) -> tuple[str, ...]:
    """Say which operations nothing is known about."""
    if not profile.uncounted:
        return ()
    named = ", ".join(f"{name} ({count})" for name, count in sorted(profile.uncounted.items()))
    return (f"Not counted as work, only by their bytes: {named}.",)


def named_pricing(cluster: Cluster, software: Software = EAGER) -> Callable[[Profile, Layout], Pricing]:
    """Give the function that prices layouts on a cluster; what it has found for a profile and a tp it keeps."""
    known: dict[tuple[int, int, bool, bool], Pricing] = {}
    parted: dict[int, tuple[Profile, Labelled, Profile]] = {}  # the profile too, so that no id is used twice

    def price(profile: Profile, layout: Layout) -> Pricing:
        key = (id(profile), layout.tp, layout.sequence, layout.recompute)
        if key not in known:
            if id(profile) not in parted:
                own = _prepared(profile, cluster)
                parted[id(profile)] = (profile, own, checkpointed(own.profile))
            known[key] = _priced(*parted[id(profile)][1:], cluster, layout, software)
        return known[key]

    return price


def price_layout(profile: Profile, cluster: Cluster, layout: Layout, software: Software = EAGER) -> Pricing:
    """Price a layout's kind (its tp, sequence sharding and recompute) on a cluster that is not here."""
    own = _prepared(profile, cluster)
    return _priced(own, checkpointed(own.profile) if layout.recompute else own.profile, cluster, layout, software)


def _prepared(profile: Profile, cluster: Cluster) -> Labelled:
    return labelled(cast_once(profile) if cluster.device.kind == "gpu" else profile)


def _priced(parted: Labelled, again: Profile, cluster: Cluster, layout: Layout, software: Software) -> Pricing:
    prices, notes = unit_prices(parted.profile, cluster, tp=layout.tp, sequence=layout.sequence, software=software)
    shown: Sequence[str] = parted.notes if layout.tp > 1 else ()
    held = again if layout.recompute else parted.profile
    table = StageTable(held, prices, tp=layout.tp, sequence=layout.sequence)
    rules = replace(GPU_RULES, keeps_partial_sums=False, blockwise=True)
    if cluster.device.kind == "cpu":
        rules = replace(rules, runtime_bytes=64 * 2**20)  # libraries and the program; see CPU_RULES
    return Pricing(table=table, rules=rules, notes=(*notes, *shown))
