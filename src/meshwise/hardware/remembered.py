"""Keep the last probe of this machine, so that planning need not measure it again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from ..errors import JobError
from .cluster import Cluster
from .files import cluster_from_json, cluster_to_json

VARIABLE = "MESHWISE_CACHE"  # the folder, instead of the user's cache folder


def cache_folder() -> Path:
    """Give the folder where probes are kept."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwise"


def remembered(key: str) -> Cluster | None:
    """Give the cluster that was kept under a key, None where there is none that can be read."""
    try:
        facts = json.loads(_file(key).read_text())
        return cluster_from_json(facts["cluster"]) if facts.get("key") == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, JobError):
        return None


def remember(key: str, cluster: Cluster) -> bool:
    """Keep a cluster under a key; tell whether that worked."""
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"key": key, "cluster": cluster_to_json(cluster)}, file)
        os.replace(file.name, path)
    except OSError:
        return False
    return True


def _file(key: str) -> Path:
    return cache_folder() / f"probe-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
