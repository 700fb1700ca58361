"""The facts of the machine and of what runs on it, which every table needs beside it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = ("meshwise", "torch", "numpy", "accelerate", "lightning-fabric", "deepspeed")


def facts() -> dict[str, object]:
    """Give processor, cores, memory, system, versions, and how busy the machine is."""
    return {
        "processor": _after("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _after("/proc/meminfo", "MemTotal"),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _after(path: str, key: str) -> str:
    lines = [line for line in _text(path).splitlines() if line.startswith(key)]
    return lines[0].partition(":")[2].strip() if lines else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
