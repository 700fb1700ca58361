"""What frameworks of published runs do that their layout does not say: kernels, state of a parameter, fixed memory."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.cost.roofline import HOST, Software

from .rows import Row

CONTEXT = 0.6e9  # bytes of a CUDA context with its kernels: 0.5 to 0.9 GiB on A100 (ml-engineering)
CHANNELS = 1.4e9  # bytes that the first collectives take: device use went from 0.55 to 2.0 GiB (ml-engineering)


FIRST_FLASH = 0.5  # FlashAttention before version 2, which is 1.7 to 3 times as fast (its paper): runs of early 2023


@dataclass(frozen=True, kw_only=True)
class State:
    """State bytes of a parameter: what ZeRO does not part at its stage stays whole on each replica."""

    weights: float
    gradients: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class Practice:
    """State what a framework does. ``fixed``: bytes on a device beside tensors, as the source measures memory."""

    software: Software
    state: State
    fused_attention: bool
    half: bool  # weights and activations are 16 bit
    fixed: float
    margin: float
    again: float  # the share of the forward that runs again in the backward
    told: float  # bytes of a gradient as it is exchanged
    overlaps: bool  # exchanges run beside the backward
    zero: int


def practice_of(row: Row) -> Practice:
    """Find out what the framework of a row does."""
    name = row.framework
    half = "16" in row.precision or "fp8" in row.precision or "float8" in row.precision
    compiled = any(word in name for word in ("compile", "thunder", "nvfuser"))
    fused = not ("megatron-deepspeed" in name or "megatron-v1" in name or "bert" in row.model)
    software = Software(
        host=HOST * (row.dp if "dataparallel" in _all(row) else 1.0),  # one process starts the kernels of all devices
        compiled=compiled,
        tf32="tf32" in row.precision,
        overlaps_tensor="tp-comm-overlap" in row.notes or "asynctp" in row.notes,
        channels_last="amp" in row.precision and "v1.5" in row.model,  # NVIDIA's recipe of ResNet-50 v1.5
        fp8="fp8" in row.precision or "float8" in row.precision,
        attention=FIRST_FLASH if "composer" in name else 1.0,
    )
    return Practice(
        software=software,
        state=_state(row, half),
        fused_attention=fused,
        half=half,
        fixed=_fixed(row),
        margin=1.0 if "allocated" in row.memory_kind else 1.05,
        again=_again(row),
        told=_told(row, half),
        overlaps="deepspeed" not in name,
        zero=_zero(row),
    )


def _all(row: Row) -> str:
    return f"{row.framework} {row.notes}"


def _zero(row: Row) -> int:
    if row.zero or "shard" in row.fsdp or "fsdp" in row.fsdp or "fsdp" in row.framework:
        return row.zero or 3
    return 1 if "param-gather" in row.notes else 0


def _again(row: Row) -> float:
    """Read how much of the forward runs again; "selective" saves about every second product (torchtitan's policy)."""
    text = row.act_ckpt
    if not text or text.startswith(("none", "no", "false", "0")):
        return 0.0
    if text.startswith("selective"):
        return 0.0 if "megatron" in row.framework else 0.5
    return 1.0


def _state(row: Row, half: bool) -> State:
    """Give bytes by scheme: mixed precision with Adam 2 + 2 + 12, Megatron's fp32 gradients 2 + 4 + 12."""
    name = row.framework
    if "gpipe" in name:  # plain SGD
        return State(weights=4, gradients=4, optimizer=0)
    if "cnn" in row.family:  # SGD with momentum
        return State(weights=4, gradients=4, optimizer=4) if not half else State(weights=2, gradients=2, optimizer=8)
    if not half:
        return State(weights=4, gradients=4, optimizer=8)
    if "bf16-true" in row.precision or "pure" in row.fsdp or "torchtune" in name:
        return State(weights=2, gradients=2, optimizer=4)
    if "fsdp" in name or "fabric" in name or "nanotron" in name:
        return State(weights=4, gradients=4, optimizer=8)
    if "megatron" in name:
        return State(weights=2, gradients=4, optimizer=12)
    return State(weights=2, gradients=2, optimizer=12)


def _told(row: Row, half: bool) -> float:
    """Give the bytes of an exchanged gradient; Megatron-Core scatters fp32 ones and gathers 16-bit weights: 3 and 3."""
    if "megatron-core" in row.framework:
        return 3.0
    return 4.0 if "fp32 allreduce" in row.precision or not half else 2.0


def _fixed(row: Row) -> float:
    if "allocated" in row.memory_kind or "reserved" in row.memory_kind or "peak" in row.memory_kind:
        return 0.0
    if not row.memory_kind or "sum" in row.notes:
        return 0.0
    return CONTEXT + (CHANNELS if row.gpus > 1 else 0.0)
