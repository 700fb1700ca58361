"""A rough, deterministic estimate of what one call costs: enough to balance stages before a profile."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tree import leaves

FLOPS_PER_SECOND = 3.0e10  # one core's reachable fp32 matmul rate, order of magnitude; only ratios matter
BYTES_PER_SECOND = 5.0e9  # one core's streaming rate, order of magnitude
CALL_SECONDS = 3.0e-6  # dispatch of one eager call

MATMULS = frozenset("linear matmul mm bmm baddbmm addmm __matmul__ __rmatmul__ einsum".split())


def estimate_call_seconds(func: Any, args: Any, result: Any) -> float:
    """Estimate the seconds of one call's forward from its arguments and result.

    Matrix products and convolutions count 2 FLOPs a multiply-add; everything moves its result once.
    """
    name = getattr(func, "__name__", "")
    made = [t for t in leaves(result) if isinstance(t, Tensor)]
    moved = sum(t.numel() * t.element_size() for t in made)
    return CALL_SECONDS + _flops(name, args, made) / FLOPS_PER_SECOND + moved / BYTES_PER_SECOND


def _flops(name: str, args: Any, made: list[Tensor]) -> float:
    tensors = [t for t in leaves(args) if isinstance(t, Tensor)]
    if not made or len(tensors) < 2:
        return 0.0
    if name.startswith("conv"):
        weight = tensors[1]
        return 2.0 * made[0].numel() * (weight.numel() / max(1, weight.shape[0]))
    if name in MATMULS:
        return 2.0 * made[0].numel() * (tensors[0].shape[-1] if tensors[0].ndim else 1)
    if name == "scaled_dot_product_attention":
        return 4.0 * tensors[0].numel() * tensors[1].shape[-2]
    if name == "multi_head_attention_forward":
        query = tensors[0]
        return 8.0 * query.numel() * query.shape[-1] + 4.0 * query.numel() * query.shape[0]
    return 0.0
