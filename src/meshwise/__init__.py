"""Train one PyTorch job on any mesh of devices, with the same result, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import MeshwiseError
from .job import Job
from .layout import Layout

if TYPE_CHECKING:
    from .comparing import compare
    from .planning import plan
    from .plans import Plan
    from .probing import probe
    from .session import Session
    from .training import TrainResult, train
    from .verification import Verdict, verify

__version__ = "0.1.0"
__all__ = [
    "Job",
    "Layout",
    "MeshwiseError",
    "Plan",
    "Session",
    "TrainResult",
    "Verdict",
    "compare",
    "plan",
    "probe",
    "train",
    "verify",
]

_LAZY = {
    "Plan": "plans",
    "Session": "session",
    "TrainResult": "training",
    "compare": "comparing",
    "plan": "planning",
    "probe": "probing",
    "train": "training",
    "Verdict": "verification",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'meshwise' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value
