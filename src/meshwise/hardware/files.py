"""Clusters as JSON: written by ``meshwise probe``, or by hand for machines that are not here.

::

    {"name": ..., "device": {"kind": "gpu", ...}, "levels": [{"size": 8, "link": {...}}], "measured": [...]}

What is wrong is named by its place: ``levels[0].link.bytes_per_second must be a number above 0, not "fast"``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import JobError
from .cluster import Cluster, Device, Level, Link, Measured

EXAMPLE = "`meshwise probe --json FILE` writes an example"


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """Give a cluster as plain values; memory without a known limit is null."""
    facts = dataclasses.asdict(cluster)
    if math.isinf(cluster.device.memory_bytes):
        facts["device"]["memory_bytes"] = None
    return facts


def cluster_from_json(facts: Mapping[str, Any]) -> Cluster:
    """Read what :func:`cluster_to_json` gave. Raises JobError that names the key that is missing or wrong."""
    top = _Part(facts, "", Cluster)
    return Cluster(
        name=top.text("name"),
        device=_device(top.part("device", Device)),
        levels=tuple(_level(part) for part in top.parts("levels", Level, least=1)),
        overlap_slowdown=top.number("overlap_slowdown", least=1.0),
        measured=tuple(_measured(part) for part in top.parts("measured", Measured)),
        is_here=top.truth("is_here"),
        sources=top.texts("sources"),
    )


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster to a file. Raises JobError where it cannot be written."""
    try:
        Path(path).write_text(json.dumps(cluster_to_json(cluster), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}.") from None


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a file. Raises JobError where it is not there or no cluster."""
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path} is no JSON: {error}.") from None
    try:
        return cluster_from_json(facts)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def _device(part: _Part) -> Device:
    return Device(
        name=part.text("name"),
        kind=part.text("kind", among=("cpu", "gpu")),
        memory_bytes=part.number("memory_bytes", above=0.0, none=math.inf),
        peak_flops=part.numbers("peak_flops"),
        reachable=part.number("reachable", above=0.0, most=1.0),
        bytes_per_second=part.number("bytes_per_second", above=0.0),
        launch_seconds=part.number("launch_seconds", least=0.0),
        multiprocessors=int(part.number("multiprocessors", least=0.0)),
        attention=part.number("attention", least=0.0, most=1.0),
        sources=part.texts("sources"),
    )


def _level(part: _Part) -> Level:
    link = part.part("link", Link)
    return Level(
        size=part.count("size"),
        link=Link(
            name=link.text("name"),
            latency_seconds=link.number("latency_seconds", least=0.0),
            bytes_per_second=link.number("bytes_per_second", above=0.0),
            source=link.text("source"),
        ),
    )


def _measured(part: _Part) -> Measured:
    return Measured(kind=part.text("kind"), group=part.count("group"), points=part.points("points"))


class _Part:
    """Read the fields of one value of ``kind``, and say where it stands when something is wrong."""

    def __init__(self, facts: Any, place: str, kind: type) -> None:
        self.place = place
        if not isinstance(facts, Mapping):
            raise JobError(f"{place or 'a cluster'} must be an object of JSON, not {_shown(facts)}; {EXAMPLE}.")
        self.facts = facts
        fields = dataclasses.fields(kind)
        unknown = next((key for key in facts if key not in {f.name for f in fields}), None)
        if unknown is not None:
            raise JobError(f"{self._at(unknown)} is not known; {place or 'a cluster'} has {_listed(kind)}.")
        self.defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        self.defaults |= {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _get(self, key: str) -> Any:
        if key not in self.facts and key not in self.defaults:
            raise JobError(f"{self._at(key)} is missing; {EXAMPLE}.")
        return self.facts.get(key, self.defaults.get(key))

    def _wrong(self, key: str, must: str) -> JobError:
        return JobError(f"{self._at(key)} must be {must}, not {_shown(self._get(key))}; {EXAMPLE}.")

    def text(self, key: str, among: tuple[str, ...] = ()) -> str:
        value = self._get(key)
        if not isinstance(value, str) or (among and value not in among):
            raise self._wrong(key, " or ".join(f'"{a}"' for a in among) or "text")
        return value

    def truth(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def count(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, "a whole number of at least 1")
        return value

    def number(
        self,
        key: str,
        *,
        above: float | None = None,
        least: float | None = None,
        most: float = math.inf,
        none: float | None = None,
    ) -> float:
        value = self._get(key)
        if value is None and none is not None:
            return none
        fits = _is_number(value) and (above is None or value > above) and (least is None or value >= least)
        if not fits or value > most:
            limits = {"above": above, "of at least": least, "of at most": most if math.isfinite(most) else None}
            bounds = [f"{words} {limit:g}" for words, limit in limits.items() if limit is not None]
            raise self._wrong(key, f"a number {' and '.join(bounds)}")
        return float(value)

    def numbers(self, key: str) -> dict[str, float]:
        value = self._get(key)
        if not isinstance(value, Mapping) or not value or not all(_is_number(v) and v > 0 for v in value.values()):
            raise self._wrong(key, 'an object with a number above 0 for each dtype, like {"fp32": 1e12}')
        return {str(k): float(v) for k, v in value.items()}

    def texts(self, key: str) -> dict[str, str]:
        value = self._get(key)
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise self._wrong(key, "an object of texts")
        return {str(k): v for k, v in value.items()}

    def points(self, key: str) -> tuple[tuple[float, float], ...]:
        value = self._get(key)
        pairs = list(value) if isinstance(value, (list, tuple)) else []
        fine = bool(pairs) and all(_is_point(pair) for pair in pairs)
        if not fine or any(late[0] <= early[0] for early, late in itertools.pairwise(pairs)):
            raise self._wrong(key, "pairs [bytes, seconds] above 0, smallest first")
        return tuple((float(size), float(seconds)) for size, seconds in pairs)

    def part(self, key: str, kind: type) -> _Part:
        return _Part(self._get(key), self._at(key), kind)

    def parts(self, key: str, kind: type, least: int = 0) -> list[_Part]:
        value = self._get(key)
        if not isinstance(value, (list, tuple)) or len(value) < least:
            raise self._wrong(key, "a list" + (f" of at least {least}" if least else ""))
        return [_Part(each, f"{self._at(key)}[{k}]", kind) for k, each in enumerate(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_point(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and all(_is_number(x) and x > 0 for x in pair)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(kind: type) -> str:
    return ", ".join(f.name for f in dataclasses.fields(kind))
