"""Keep the last probe of this machine, so that planning need not measure it again.

A file that is broken, or cannot be written, stops nobody: it is as if nothing had been kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import tempfile
from pathlib import Path

from ..errors import JobError
from .cluster import Cluster
from .files import cluster_from_json, cluster_to_json

VARIABLE = "MESHWISE_CACHE"  # the folder, instead of the user's cache folder
QUOTAS = ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us")  # of control groups, versions 2 and 1
ROOT = Path("/")


def cache_folder() -> Path:
    """Give the folder where probes are kept. Raises RuntimeError where the user has no home."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "meshwise"


def remembered(key: str) -> Cluster | None:
    """Give the cluster that was kept under a key, None where there is none that can be read."""
    try:
        facts = json.loads(_file(key).read_text(encoding="utf-8"))
        return cluster_from_json(facts["cluster"]) if facts["key"] == key else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, JobError):
        return None


def remember(key: str, cluster: Cluster) -> bool:
    """Keep a cluster under a key; tell whether that worked."""
    text = json.dumps({"key": key, "cluster": cluster_to_json(cluster)})
    try:
        path = _file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, path)  # whole, or not at all: others may be reading or writing it
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except (OSError, RuntimeError):
        return False
    return True


def host_facts(root: Path = ROOT) -> tuple[str, ...]:
    """Name what a host's speed depends on: host, processor, the cores that may be used, a quota of their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = next((text for name in QUOTAS if (text := _read(root / name))), "")
    return socket.gethostname(), processor_name(root), f"{cores} cores", " ".join(quota.split())


def processor_name(root: Path = ROOT) -> str:
    """Give the processor's name as the system states it."""
    pairs = (line.partition(":") for line in _read(root / "proc/cpuinfo").splitlines())
    named = (value.strip() for key, _, value in pairs if key.strip() == "model name")
    return next(filter(None, named), "") or platform.processor() or platform.machine()


def _file(key: str) -> Path:
    return cache_folder() / f"probe-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
