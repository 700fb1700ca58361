"""Replicas beside DDP and every peer; and the exact reduction beside the fast one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .cases import CASES
from .contender import Contender, meshwise
from .measure import Effort, Row
from .turns import compete

BEST = {"gradient_as_bucket_view": True, "static_graph": True}
DDP = "DDP, best settings"
OUTER = ("resnet", "vgg16-64", "resnet50-96")  # no row of the frameworks: minutes each, and they all wrap DDP
HUGE = ("vgg16-224",)  # only both sides: each rank of each contender holds 1.7 GB
FOUR_RANKS = {"mlp": 0.45, "wide-mlp": 0.45}  # targets
PARTS = 3  # microbatches a replica in the second comparison of exact and fast


def replicas(names: Sequence[str], effort: Effort, *, peers: bool = True) -> Iterator[Row]:
    """Compare two replicas, one microbatch each, with DDP at its best settings, and the peers with it too."""
    for name in names:
        contenders = _replicas(name, 2)
        if name not in HUGE and peers:
            contenders += _relatives(name) + ([] if name in OUTER else _peers(name))
        found = compete(contenders, effort)
        mine, _, *others = [c.name for c in contenders]
        yield Row.ratio("dp", name, found, mine, DDP, CASES[name].target)
        yield from (Row.ratio("dp", name, found, other, DDP) for other in others)


def four_ranks(names: Sequence[str], effort: Effort) -> Iterator[Row]:
    """Compare four replicas with DDP on four ranks, on however many cores there are."""
    for name in names:
        if name in FOUR_RANKS:
            contenders = _replicas(name, 4)
            found = compete(contenders, effort)
            yield Row.ratio("dp=4", name, found, contenders[0].name, DDP, FOUR_RANKS[name])


def exactness(names: Sequence[str], effort: Effort) -> Iterator[Row]:
    """Compare the exact reduction with the backend's own order, in the same processes."""
    for name in names:
        case = CASES[name]
        part = max(1, case.batch // PARTS)
        contenders = []
        for ending, batch, microbatch in (
            ("", 2 * case.batch, case.batch),
            (" in parts", 2 * PARTS * part, part),
        ):
            for kind, layout in (("exact", "dp=2"), ("fast", "dp=2,reduction=fast")):
                contenders.append(
                    meshwise(kind + ending, name, layout, ranks=2, batch=batch, microbatch=microbatch)
                )
        found = compete(contenders, effort)
        for ending in ("", " in parts"):
            yield Row.ratio("exactness", name, found, "exact" + ending, "fast" + ending, 1.02)


def _replicas(name: str, ranks: int) -> list[Contender]:
    """State meshwise and DDP at its best settings, the same samples a rank."""
    batch = CASES[name].batch
    mine = meshwise(f"meshwise dp={ranks}", name, f"dp={ranks}", ranks=ranks, batch=ranks * batch, microbatch=batch)
    return [mine, _ddp(name, DDP, ranks=ranks)]


def _ddp(name: str, title: str, *, ranks: int = 2, launch: str = "torchrun", **options: Any) -> Contender:
    given = {"batch": ranks * CASES[name].batch, "ddp": BEST, **options}
    return Contender(name=title, kind="ddp", case=name, ranks=ranks, launch=launch, options=given)


def _relatives(name: str) -> list[Contender]:
    """State DDP otherwise, and the same samples in a plain loop."""
    batch = 2 * CASES[name].batch
    loops = [
        Contender(
            name=f"plain loop, {threads} thread{'s' * (threads > 1)}",
            kind="plain",
            case=name,
            ranks=1,
            threads=threads,
            options={"batch": batch},
        )
        for threads in (1, 2)
    ]
    return [
        _ddp(name, "DDP, defaults", ddp={}),
        _ddp(name, "DDP, best settings, fused SGD", optimizer={"fused": True}),
        _ddp(name, "DDP, best settings, allocator as meshwise's ranks", launch="meshwise"),
        *loops,
    ]


def _peers(name: str) -> list[Contender]:
    options = {"batch": 2 * CASES[name].batch, "ddp": BEST}
    kinds = {
        "Accelerate": "accelerate",
        "Lightning Fabric": "fabric",
        "DeepSpeed ZeRO-1": "deepspeed",
        "fully_shard": "fsdp",
        "ZeroRedundancyOptimizer": "zero",
    }
    return [Contender(name=title, kind=kind, case=name, options=options) for title, kind in kinds.items()]
