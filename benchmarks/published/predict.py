"""Predict the step time and the memory of a published run, with the layout as its source states it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from meshwise.cost.blocks import block_of
from meshwise.cost.estimate import Pricing, Workload, cut_stages, estimate, memory_of
from meshwise.cost.links import collective_seconds
from meshwise.cost.profile import ParameterProfile, Profile
from meshwise.cost.roofline import price_layout
from meshwise.errors import JobError
from meshwise.hardware.cluster import Cluster, Level
from meshwise.hardware.named import find_device, named_cluster
from meshwise.layout import Layout
from meshwise.plans import Estimate

from .counting import Unknown, profile_of, sizes_of
from .practice import Practice, practice_of
from .rows import Row

NO_GAIN = 1e9  # the slowdown of computing beside an exchange at which it could as well wait
MOST_UNKNOWN = (1, 2, 4, 8)  # microbatches that are tried where the source does not state one


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Hold what was predicted: seconds of a step, bytes of the fullest device (or their sum), and the estimate."""

    seconds: float
    num_bytes: float
    estimate: Estimate
    samples: float
    tokens: float
    flops: float  # of the forward of a sample


def predict(row: Row) -> Prediction:
    """Predict one row. Raises Unknown for what cannot be rebuilt, and says why."""
    if row.cp > 1 or row.ep > 1:
        raise Unknown("context and expert parallelism are not modelled")
    practice, cluster = practice_of(row), cluster_of(row)
    if not practice.overlaps:
        cluster = replace(cluster, overlap_slowdown=NO_GAIN)
    if row.micro_batch:
        return _at(row, practice, cluster, max(1, round(row.micro_batch)))
    if not row.global_batch:
        raise Unknown("the source states neither a microbatch nor a batch")
    share = max(1, row.global_batch // row.dp)
    found = [_at(row, practice, cluster, m) for m in MOST_UNKNOWN if share % m == 0]
    fits = [p for p in found if p.num_bytes <= cluster.device.memory_bytes] or found[:1]
    return min(fits, key=lambda p: p.seconds)


def _at(row: Row, practice: Practice, cluster: Cluster, micro: int) -> Prediction:
    profile = profile_of(row, practice, micro)
    profile = replace(profile, parameters=_with_state(profile, practice))
    batch = row.global_batch or micro * row.dp
    count = max(1, round(batch / (row.dp * micro)))
    workload = Workload(batch_size=batch, num_microbatches=count * row.dp, slots=row.dp, clips=False)
    whole = layout_of(row, practice)
    cuts = cuts_of(row, profile, whole.num_stages)
    if "dataparallel" in row.framework + row.notes:
        return _in_one_process(row, practice, cluster, profile, whole)
    found = []
    for again in {practice.again > 0, practice.again == 1}:
        layout = replace(whole, recompute=again)
        pricing = _pricing(row, practice, profile, cluster, layout)
        found.append((estimate(profile, cluster, workload, layout, cuts, pricing), layout, pricing))
    low = min(found, key=lambda f: f[0].seconds)
    high = max(found, key=lambda f: f[0].seconds)
    seconds = low[0].seconds + practice.again * (high[0].seconds - low[0].seconds) if len(found) > 1 else low[0].seconds
    chosen = high if practice.again else low
    return Prediction(
        seconds=seconds,
        num_bytes=_bytes(row, practice, profile, workload, chosen[1], cuts, chosen[2]),
        estimate=chosen[0],
        samples=batch,
        tokens=batch * row.seq,
        flops=_forward_flops(profile) / profile.microbatch_size,
    )


def _in_one_process(row: Row, practice: Practice, cluster: Cluster, profile: Profile, whole: Layout) -> Prediction:
    """Predict torch's DataParallel: parameters go out and gradients come back in each step, beside nothing."""
    layout = replace(whole, dp=1, zero=0)
    workload = Workload(batch_size=profile.microbatch_size, num_microbatches=1, slots=1)
    pricing = _pricing(row, practice, profile, cluster, layout)
    alone = estimate(profile, cluster, workload, layout, (), pricing)
    num_bytes = float(sum(p.num_bytes for p in profile.parameters.values()))
    told = 2 * collective_seconds(cluster, "broadcast", num_bytes, size=row.dp)
    parts = {**alone.time_parts, "communication": told}
    parts["optimizer"] = 0.0 if "no optimizer" in row.notes else parts["optimizer"]
    seconds = sum(parts.values())
    return Prediction(
        seconds=seconds,
        num_bytes=_bytes(row, practice, profile, workload, layout, (), pricing),
        estimate=replace(alone, seconds=seconds, time_parts=parts),
        samples=row.global_batch or profile.microbatch_size * row.dp,
        tokens=0.0,
        flops=_forward_flops(profile) / profile.microbatch_size,
    )


def _forward_flops(profile: Profile) -> float:
    return sum(w.forward_flops for u in profile.units for w in u.work)


def _with_state(profile: Profile, practice: Practice) -> dict[str, ParameterProfile]:
    """Give parameters the bytes of the framework's optimizer, and those that are exchanged."""
    return {
        name: replace(
            p,
            num_bytes=round(p.num_elements * practice.told),
            optimizer_bytes=round(p.num_elements * practice.state.optimizer),
        )
        for name, p in profile.parameters.items()
    }


_prices: dict[object, tuple[Profile, Pricing]] = {}


def _pricing(row: Row, practice: Practice, profile: Profile, cluster: Cluster, layout: Layout) -> Pricing:
    """Price a kind of layout once for a model, a microbatch size and a cluster."""
    plain = replace(layout, dp=1, pp=1, zero=0, schedule="1f1b", virtual=1)
    key = (sizes_of(row, practice), practice, profile.microbatch_size, cluster.device.name, repr(cluster.levels), plain)
    if key not in _prices:
        _prices[key] = (profile, price_layout(profile, cluster, plain, practice.software))
    return _prices[key][1]


def layout_of(row: Row, practice: Practice) -> Layout:
    """Give the row's layout."""
    schedule, virtual = "1f1b", 1
    if row.pp > 1:
        if "gpipe" in row.schedule:
            schedule = "gpipe"
        elif "interleaved" in row.schedule or row.vpp > 1:
            schedule, virtual = "interleaved", max(2, row.vpp)
        elif "zb" in row.schedule or "zero" in row.schedule:
            schedule = "zero-bubble"
    zero = practice.zero if row.dp > 1 else 0
    sequence = row.tp > 1 and (row.sp or "torchtitan" in row.framework or "megatron-core" in row.framework)
    return Layout(dp=row.dp, pp=row.pp, tp=row.tp, zero=zero, schedule=schedule, virtual=virtual, sequence=sequence)


def cuts_of(row: Row, profile: Profile, num_stages: int) -> tuple[int, ...]:
    """Cut into equal numbers of layers, as Megatron does, or where the source says."""
    if num_stages == 1:
        return ()
    starts = layer_starts(profile)
    count = len(starts)
    partition = re.search(r"partition \[([\d, ]+)\]", row.notes)
    if partition and count:
        edges = [int(n) for n in partition.group(1).split(",")]
        outside = (edges[-1] - count) // 2
        inner = [min(count - 1, max(1, e - outside)) for e in edges[1:-1]]
    elif count >= num_stages:
        inner = [k * count // num_stages for k in range(1, num_stages)]
    else:
        balance = re.search(r"balance \(layers per stage\) ([\d,]+)", row.notes)
        units = len(profile.units)
        shares = [int(n) for n in balance.group(1).split(",")] if balance else [1] * num_stages
        total, ends = sum(shares), [sum(shares[: k + 1]) for k in range(len(shares) - 1)]
        return tuple(max(1, min(units - 1, round(e * units / total))) for e in ends)
    return tuple(starts[k] for k in inner)


def layer_starts(profile: Profile) -> list[int]:
    """Give the first unit of each layer of a transformer."""
    starts: dict[str, int] = {}
    for k, unit in enumerate(profile.units):
        name = block_of(unit)
        if re.fullmatch(r"layers\.\d+", name):
            starts.setdefault(name, k)
    return list(starts.values())


def _bytes(
    row: Row, practice: Practice, profile: Profile, workload: Workload, layout: Layout, cuts: tuple[int, ...],
    pricing: Pricing,
) -> float:  # fmt: skip
    """Add up memory; weights and gradients have the framework's bytes, not those that were counted."""
    stages = cut_stages(pricing.table, cuts)
    ranks = memory_of(profile, workload, layout, stages, pricing.rules)
    counted = practice.told
    totals = []
    for rank in ranks:
        parts = dict(rank.parts)
        parts["parameters"] *= practice.state.weights / counted
        parts["gradients"] *= practice.state.gradients / counted
        parts["runtime"] = 0.0
        totals.append(sum(parts.values()) * practice.margin + practice.fixed)
    if "sum" in row.notes:
        return sum(totals)
    return totals[0] if "nvidia-smi" in row.memory_kind else max(totals)  # people look at the first node


# ---- hardware ------------------------------------------------------------------------------------------------------


def cluster_of(row: Row) -> Cluster:
    """Find the hardware of a row, with its network where the source states one."""
    name = device_name(row.gpu)
    inside = min(row.gpus_per_node or 8, row.gpus)
    nodes = -(-row.gpus // inside)
    return _cluster(name, nodes, inside, _network(row.interconnect, row.gpus_per_node or 8))


@functools.cache
def _cluster(name: str, nodes: int, inside: int, network: float | None) -> Cluster:
    cluster = named_cluster(f"{nodes}x{inside}x{name}" if nodes > 1 else f"{inside}x{name}")
    if network is None or nodes == 1:
        return cluster
    link = replace(cluster.levels[-1].link, bytes_per_second=0.8 * network, source="the run's own source")
    return replace(cluster, levels=(cluster.levels[0], Level(size=nodes, link=link)))


NETWORKS = (  # how sources write bandwidth, and whether all devices of a node share it
    (r"(\d+) gb/s rdma per gpu", False),
    (r"(\d+) gb/s per gpu", False),
    (r"8x(\d+)gb/s", False),
    (r"(\d+) gb/s (?:\w+ )?per node", True),
    (r"(\d+) gb/s between nodes", True),
)


def _network(text: str, per_node: int) -> float | None:
    """Read "400 Gb/s per node" and the like as bytes a second of one device."""
    for pattern, shared in NETWORKS:
        found = re.search(pattern, text)
        if found:
            return float(found.group(1)) * 1e9 / 8 / (per_node if shared else 1)
    return None


def device_name(text: str) -> str:
    """Find a known device in a row's text. Raises Unknown."""
    clean = text.replace("geforce", "").replace("nvidia", "").replace("tesla", "").strip()
    clean = re.sub(r"\(.*?\)", "", clean).strip()
    for name in (clean, *_variants(clean)):
        try:
            return str(find_device(name)["name"])
        except JobError:
            continue
    raise Unknown(f"no device {text!r} is known")


def _variants(text: str) -> list[str]:
    words = re.split(r"[\s-]+", text)
    found = [" ".join(words[:k]) for k in range(len(words), 0, -1)]
    chip = next((w for w in words if re.fullmatch(r"[a-z]{1,2}\d{2,4}[a-z]?", w)), "")
    size = next((w for w in words if re.fullmatch(r"\d+gb", w)), "")
    return [f"{chip}-{size}", *found, chip]
