"""Clusters as JSON: written by ``meshwise probe``, or by hand for machines that are not here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import JobError
from .cluster import Cluster, Device, Level, Link, Measured


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """Give a cluster as plain values."""
    return dataclasses.asdict(cluster)


def cluster_from_json(facts: Mapping[str, Any]) -> Cluster:
    """Read what :func:`cluster_to_json` gave. Raises JobError that names the key that is missing or wrong."""
    try:
        rest = {k: v for k, v in facts.items() if k not in ("device", "levels", "measured")}
        return Cluster(
            device=_make(Device, facts["device"], "device"),
            levels=tuple(_level(level) for level in facts["levels"]),
            measured=tuple(
                Measured(
                    kind=m["kind"], group=int(m["group"]), points=tuple((float(b), float(s)) for b, s in m["points"])
                )
                for m in facts.get("measured", ())
            ),
            **rest,
        )
    except KeyError as error:
        raise JobError(
            f"a cluster needs the key {error.args[0]!r}; `meshwise probe --json FILE` writes an example."
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise JobError(f"this is no cluster: {error}; `meshwise probe --json FILE` writes an example.") from None


def _level(facts: Mapping[str, Any]) -> Level:
    return Level(size=int(facts["size"]), link=_make(Link, facts["link"], "link"))


def _make(kind: Any, facts: Mapping[str, Any], what: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = [k for k in facts if k not in known]
    if unknown:
        raise ValueError(f"{what} has no {unknown[0]!r}; known are {', '.join(known)}")
    missing = [
        n
        for n, f in known.items()
        if n not in facts and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise KeyError(f"{what}.{missing[0]}")
    return kind(**facts)


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster to a file."""
    path.write_text(json.dumps(cluster_to_json(cluster), indent=1) + "\n")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a file. Raises JobError where it is not there or no cluster."""
    try:
        facts = json.loads(path.read_text())
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise JobError(f"{path} is no JSON: {error}.") from None
    if not isinstance(facts, dict):
        raise JobError(f"{path} holds no cluster.")
    return cluster_from_json(facts)
