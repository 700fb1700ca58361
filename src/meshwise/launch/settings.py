"""The settings of torch that change what is computed, read in the parent and set again in each rank."""

from __future__ import annotations

from typing import Any

import torch


def current() -> dict[str, Any]:
    """Read the settings of this process."""
    return {
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


def apply(values: dict[str, Any]) -> None:
    """Set what another process read by ``current``, where it differs: even asking torch for what is so can be slow."""
    before = current()
    if values["dtype"] != before["dtype"]:
        torch.set_default_dtype(values["dtype"])
    if values["matmul"] != before["matmul"]:
        torch.set_float32_matmul_precision(values["matmul"])
    if any(values[name] != before[name] for name in ("deterministic", "warn_only")):  # imports torch's compiler
        torch.use_deterministic_algorithms(values["deterministic"], warn_only=values["warn_only"])
    torch.backends.mkldnn.enabled = values["mkldnn"]
    torch.backends.cudnn.deterministic = values["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = values["cudnn_benchmark"]
