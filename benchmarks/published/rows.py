"""Read a table of published training runs: one row is a model, a layout on some hardware, and what was measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one published run. Sizes that the source does not state are 0; texts are in small letters."""

    id: str
    set: str
    model: str
    family: str
    params: float  # parameters, as the source counts them
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    gpu: str
    gpus: int
    gpus_per_node: int
    interconnect: str
    framework: str
    tp: int
    sp: bool
    pp: int
    dp: int
    cp: int
    ep: int
    zero: int
    fsdp: str
    schedule: str
    vpp: int
    micro_batch: float
    global_batch: int
    act_ckpt: str
    precision: str
    seconds: float | None  # of a step
    tokens_per_device: float | None  # a second
    samples: float | None  # a second, of all devices
    flops: float | None  # FLOP/s of a device, as the source counts them
    hardware_flops: bool  # ... with those of recompute
    memory: float | None  # bytes
    memory_kind: str
    failed: bool
    notes: str


def read_rows(path: Path) -> list[Row]:
    """Read all rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(facts) for facts in csv.DictReader(file)]


def _row(facts: dict[str, str]) -> Row:
    text = {k: (v or "").strip() for k, v in facts.items() if isinstance(k, str)}
    low = {k: v.lower() for k, v in text.items()}
    number = {k: _number(v) for k, v in text.items()}

    def count(name: str, otherwise: int = 0) -> int:
        found = number.get(name)
        return int(found) if found else otherwise

    gpus = count("gpus", 1)
    tp, pp, cp = count("tp", 1), count("pp", 1), count("cp", 1)
    unit = 2**30 if "gib" in low.get("mem_kind", "") else 1e9
    memory = number.get("mem_gb")
    flops = number.get("tflops_per_gpu")
    return Row(
        id=text.get("id", ""),
        set=text.get("set", ""),
        model=low.get("model", ""),
        family=low.get("family", ""),
        params=(number.get("params_b") or 0.0) * 1e9,
        layers=count("layers"),
        hidden=count("hidden"),
        heads=count("heads"),
        kv_heads=count("kv_heads"),
        ffn=count("ffn"),
        seq=count("seq"),
        vocab=count("vocab"),
        gpu=low.get("gpu", ""),
        gpus=gpus,
        gpus_per_node=count("gpus_per_node", 8),
        interconnect=low.get("interconnect", ""),
        framework=low.get("framework", ""),
        tp=tp,
        sp=low.get("sp", "") in ("1", "1.0", "true", "yes"),
        pp=pp,
        dp=count("dp", max(1, gpus // (tp * pp * cp))),
        cp=cp,
        ep=count("ep", 1),
        zero=count("zero_stage"),
        fsdp=low.get("fsdp_mode", ""),
        schedule=low.get("schedule", ""),
        vpp=count("vpp", 1),
        micro_batch=number.get("micro_batch") or 0.0,
        global_batch=count("global_batch"),
        act_ckpt=low.get("act_ckpt", ""),
        precision=low.get("precision", ""),
        seconds=number.get("step_time_s"),
        tokens_per_device=number.get("tokens_per_s_per_gpu"),
        samples=number.get("samples_per_s_total"),
        flops=None if flops is None else flops * 1e12,
        hardware_flops="hardware" in low.get("flops_kind", "") or "factor 4" in low.get("flops_kind", ""),
        memory=None if memory is None else memory * unit,
        memory_kind=low.get("mem_kind", ""),
        failed=bool(low.get("oom")) and low["oom"] not in ("0", "0.0", "false", "no"),
        notes=low.get("notes", ""),
    )


def _number(text: str) -> float | None:
    """Read the first number of a field, as in ``3`` of "3" or ``1`` of "1 (assumed)"."""
    found = re.match(r"\s*(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text, re.IGNORECASE)
    return float(found.group(1)) if found else None


def by_set(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Give the rows of each source together, in the order of the file."""
    names = dict.fromkeys(row.set for row in rows)
    for name in names:
        yield name, [row for row in rows if row.set == name]
