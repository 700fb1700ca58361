"""Clusters by name: ``8xH100``, ``4x8xA100-80GB`` (nodes x devices), ``2xcpu``; facts and sources in devices.json."""

from __future__ import annotations

import difflib
import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import JobError
from .cluster import Cluster, Device, Level, Link

OVERLAP = 1.15  # by how much computing slows down beside a collective: 1.1 to 1.3 is usual on GPUs (Galvatron)
DEVICE_FIELDS = (
    "kind", "memory_bytes", "peak_flops", "reachable", "bytes_per_second", "launch_seconds", "multiprocessors",
    "attention", "sources",
)  # fmt: skip


def named_cluster(text: str) -> Cluster:
    """Give the cluster that ``NxDEVICE`` or ``NODESxNxDEVICE`` names, or that a JSON file holds.

    Raises JobError for a device that is not known (it lists those that are) or a number that makes no sense.
    """
    if text.endswith(".json") or Path(text).is_file():
        from .files import read_cluster

        return read_cluster(Path(text))
    parts = text.replace("*", "x").split("x")
    numbers = []
    while len(parts) > 1 and parts[0].strip().isdigit():
        numbers.append(int(parts.pop(0)))
    facts = find_device("x".join(parts).strip())
    if not numbers:
        numbers = [1]
    if len(numbers) > 2 or min(numbers) < 1:
        raise JobError(f"cluster {text!r}: write DEVICES x NAME or NODES x DEVICES x NAME, like 4x8xH100.")
    return _cluster(text, facts, numbers)


def _cluster(text: str, facts: dict[str, Any], numbers: list[int]) -> Cluster:
    """Put devices in nodes: as written, or as many in a node as the device usually has."""
    usual = int(facts["devices_per_node"])
    if len(numbers) == 1:
        count = numbers[0]
        numbers = [1, count] if count <= usual else [-(-count // usual), usual]
        if numbers[0] * numbers[1] != count:
            raise JobError(
                f"cluster {text!r}: {count} devices are no whole number of nodes of {usual}; write NODES x DEVICES x "
                f"{facts['name']}, like {numbers[0]}x{usual}x{facts['name']}."
            )
    nodes, inside = numbers
    device = Device(name=facts["name"], **{k: facts[k] for k in DEVICE_FIELDS if k in facts})
    levels = [Level(size=inside, link=Link(**facts["node_link"]))]
    if nodes > 1:
        levels.append(Level(size=nodes, link=Link(**facts["network"])))
    return Cluster(
        name=text,
        device=device,
        levels=tuple(levels),
        overlap_slowdown=OVERLAP if facts["kind"] == "gpu" else 1.0,
        sources={"overlap_slowdown": "1.1 to 1.3 is usual, one coefficient for each machine (Galvatron)"},
    )


def find_device(name: str) -> dict[str, Any]:
    """Give the facts of a device by its name or a short one. Raises JobError with the nearest names."""
    table = device_table()
    wanted = name.lower().replace(" ", "-").replace("_", "-")
    if wanted in table:
        return table[wanted]
    names = sorted({facts["name"] for facts in table.values()})
    near = difflib.get_close_matches(wanted, table, n=3, cutoff=0.5)
    hint = f" Did you mean {', '.join(dict.fromkeys(table[n]['name'] for n in near))}?" if near else ""
    raise JobError(
        f"no device {name!r} is known.{hint} Known are {', '.join(names)}; other machines can be described by a JSON "
        "file, see `meshwise probe --json`."
    )


@functools.cache
def device_table() -> dict[str, dict[str, Any]]:
    """Give the facts of all devices, by name and short names in small letters."""
    text = resources.files(__package__).joinpath("devices.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = {}
    for facts in json.loads(text)["devices"]:
        for name in (facts["name"], *facts["aliases"]):
            table[name.lower()] = facts
    return table
