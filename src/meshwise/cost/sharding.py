"""How tp would part a model: which products by column, which by row, what is done whole; found from shapes and order.

::

    x --+-- q k v (column) -- attention (heads) -- o (row) --+--      one all-reduce behind every row product,
        |                                                    |        and as many in the backward
        +----------------------------------------------------+

The width of the stream is the size that most matrices share. A matrix from the stream is parted by column; one that
leads back into it is parted by row if columns (and, where it is square, an attention) stand before it. Embedding and
head are parted by vocabulary. What is not recognised is done whole by every rank (arXiv:1909.08053; with sequence
sharding, arXiv:2205.05198, what is done whole is parted by sequence).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .profile import ParameterProfile, Profile, UnitProfile, Work

PRODUCTS = ("matmul", "attention", "conv")
ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Hold a profile with tp's labels, and what to say about it."""

    profile: Profile
    notes: tuple[str, ...] = ()


def labelled(profile: Profile) -> Labelled:
    """Give the profile with ``shard``, ``tp_reduces``, ``saved_sharded_bytes`` and ``tp_sharded`` filled in."""
    width = stream_width(profile)
    if width is None:
        return Labelled(profile=profile, notes=("tp parts nothing of this model: no stream of one width was found.",))
    kinds = unit_kinds(profile, width)
    units = tuple(_label(u, k, width) for u, k in zip(profile.units, kinds, strict=True))
    sharded = {n for u, k in zip(profile.units, kinds, strict=True) if k for n in u.params}
    parameters = {
        n: replace(p, tp_sharded=n in sharded and len(p.shape) >= 1 and not _is_stream_vector(p, width))
        for n, p in profile.parameters.items()
    }
    total = sum(p.num_elements for p in parameters.values())
    share = sum(p.num_elements for p in parameters.values() if p.tp_sharded) / max(1, total)
    notes = () if share > 0.9 else (f"tp parts only {share:.0%} of the parameters of this model.",)
    return Labelled(profile=replace(profile, units=units, parameters=parameters), notes=notes)


def stream_width(profile: Profile) -> int | None:
    """Give the size that most weight matrices have, None where less than half of them share one."""
    matrices = [p.shape for p in profile.parameters.values() if len(p.shape) == 2]
    if len(matrices) < 4:
        return None
    counts = Counter(size for shape in matrices for size in set(shape))
    size, number = max(counts.items(), key=lambda item: (item[1], item[0]))
    return size if 2 * number > len(matrices) else None


def _is_stream_vector(parameter: ParameterProfile, width: int) -> bool:
    """Tell the bias of a row product (added once, whole) from that of a column product."""
    return len(parameter.shape) == 1 and parameter.shape[0] == width


def unit_kinds(profile: Profile, width: int) -> list[str]:
    """Give each unit's kind: column, row, pair (both), vocab, or empty for what is done whole."""
    kinds: list[str] = []
    columns, attended = False, False
    for unit in profile.units:
        shapes = [profile.parameters[n].shape for n in unit.params if n in profile.parameters]
        kind = _kind(unit, [s for s in shapes if len(s) == 2], width, columns, attended)
        kinds.append(kind)
        if kind == "column":
            columns = True
        elif kind in ("row", "pair"):
            columns = attended = False
        if any(_attends(w) for w in unit.work) and kind != "pair":
            attended = True
    return kinds


def _attends(work: Work) -> bool:
    """Tell attention, also as products of many small matrices."""
    return work.kind == "attention" or (work.kind == "matmul" and len(work.shape) > 3 and work.shape[0] > 1)


def _kind(unit: UnitProfile, matrices: Sequence[tuple[int, ...]], width: int, columns: bool, attended: bool) -> str:
    if not matrices:
        return ""
    if any(max(s) > 8 * width or w.op.startswith("embedding") for s in matrices for w in unit.work[:1]):
        return "vocab"
    if any(max(s) > 8 * width for s in matrices) or any(w.op.startswith("embedding") for w in unit.work):
        return "vocab"
    if not any(w.kind == "matmul" for w in unit.work):
        return ""
    inward = [s for s in matrices if s[0] == width]  # (out, in): back into the stream
    outward = [s for s in matrices if s[1] == width]
    if len(matrices) > 1 and inward and outward:
        return "pair"
    if inward and not outward:
        return "row" if columns else ""
    if inward and outward:  # square
        return "row" if columns and attended else "column"
    return "column" if outward else ""


def _label(unit: UnitProfile, kind: str, width: int) -> UnitProfile:
    if not kind:
        return unit
    work = tuple(replace(w, shard=_shard(w, kind)) for w in unit.work)
    stream = _stream_bytes(unit)
    whole = unit.saved_bytes + unit.saved_input_bytes
    if kind == "row":
        return replace(unit, work=work, tp_reduces=1, tp_reduce_bytes=stream, saved_sharded_bytes=whole)
    if kind == "pair":
        return replace(
            unit, work=work, tp_reduces=1, tp_reduce_bytes=stream, saved_sharded_bytes=max(0.0, whole - stream)
        )
    if kind == "vocab":
        embeds = any(w.op.startswith("embedding") for w in unit.work)
        sharded = 0.0 if embeds else max(0.0, whole - stream)
        return replace(unit, work=work, tp_reduces=1, tp_reduce_bytes=stream, saved_sharded_bytes=sharded)
    return replace(unit, work=work, saved_sharded_bytes=max(0.0, whole - unit.saved_input_bytes))


def _stream_bytes(unit: UnitProfile) -> float:
    """Give the bytes that the unit's all-reduce adds up: what its product gives, or the gradient of a head's input."""
    product = next((w for w in unit.work if w.kind == "matmul" and w.forward_flops and len(w.shape) > 3), None)
    if product is None:
        return unit.boundary_bytes
    number, rows, columns, depth = product.shape[:4]
    return number * rows * (columns if unit.boundary_bytes else depth) * ELEMENT_BYTES.get(product.dtype, 4)


def _shard(work: Work, kind: str) -> str:
    """Label one kind of operation in a unit of a kind."""
    if kind == "vocab":
        return "vocab"
    if kind == "pair":
        return "column" if work.kind in PRODUCTS else "inner"
    if kind == "row":
        return "row" if work.kind in PRODUCTS else "none"
    return "heads" if _attends(work) else "column" if work.kind in PRODUCTS else "inner"
