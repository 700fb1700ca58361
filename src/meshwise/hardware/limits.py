"""How much memory a device may use here, and how much a process has used.

A CPU device is a process. What it may use is the smallest of

* its part of the host: what is free now (``MemAvailable``, and for every control group on the way up, versions 1 and 2,
  its limit less what it holds already, file cache that can be dropped not counted), divided by the devices;
* what limits of the process leave: ``RLIMIT_AS`` (``ulimit -v``) and ``RLIMIT_DATA`` (``ulimit -d``), which ranks
  inherit, less what a rank takes of that count before it holds any tensor.

Swap is not counted: training from it is no use. Ask before the job's ranks start, or they count as used.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..quantities import format_bytes

ROOT = Path("/")
NO_LIMIT = 1 << 60  # bytes; control groups of version 1 say "none" by a number of pages near 2**63
RESET_PEAK = "5"  # what /proc/PID/clear_refs takes for "begin a new peak" (man 5 proc)
RESOURCES = (("RLIMIT_AS", "ulimit -v", "address_space"), ("RLIMIT_DATA", "ulimit -d", "data"))


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """State what one device may use: ``bytes`` (infinite where nothing is known) and why, in words with the numbers.

    ``per_process``: it is a limit of each process (or a device's own memory), else a part of what all devices share.
    """

    bytes: float
    reason: str
    per_process: bool

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes) if math.isfinite(self.bytes) else 'unlimited'}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Occupied:
    """Hold what a process takes of each count, in bytes: of RLIMIT_AS, of RLIMIT_DATA, and of the host for itself."""

    address_space: int = 0
    data: int = 0
    own: int = 0


def device_memory(
    num_devices: int,
    *,
    fresh: Occupied | None = None,
    accelerator: tuple[int, int] | None = None,
    limits: Mapping[str, float] | None = None,
    root: Path = ROOT,
) -> MemoryLimit:
    """Find how much memory each of ``num_devices`` on this host may use beyond what a fresh rank holds.

    ``fresh``: what a rank without a tensor occupies (as it measured it by :func:`occupied`); without it this process
    stands for one. ``accelerator``: free and all bytes of an accelerator, as its library says; then nothing else
    counts. ``limits`` (by default those of this process, see :func:`process_limits`) and ``root`` are for tests.
    """
    if accelerator is not None:
        free, total = accelerator
        reason = f"{format_bytes(free)} of the device's {format_bytes(total)} are free"
        return MemoryLimit(bytes=float(free), reason=reason, per_process=True)
    held = occupied(root=root) if fresh is None else fresh
    own = 0 if fresh is None else fresh.own
    candidates = [_of_host(num_devices, own, root)]
    candidates += _of_process(process_limits() if limits is None else limits, held)
    return min(candidates, key=lambda limit: limit.bytes)


def process_limits() -> dict[str, float]:
    """Read the soft limits of this process by name, in bytes; those that are set."""
    try:
        import resource
    except ImportError:  # not a Unix
        return {}
    found: dict[str, float] = {}
    for name, _, _ in RESOURCES:
        soft = resource.getrlimit(getattr(resource, name))[0] if hasattr(resource, name) else resource.RLIM_INFINITY
        if soft != resource.RLIM_INFINITY:
            found[name] = float(soft)
    return found


def occupied(root: Path = ROOT) -> Occupied:
    """Read what this process takes now; zeros where the system does not say."""
    return Occupied(
        address_space=_status("VmSize", root) or 0, data=_status("VmData", root) or 0, own=_private_bytes(root)
    )


def resident_bytes() -> int | None:
    """Give the memory this process holds now; None where the system does not say."""
    return _status("VmRSS", ROOT)


def file_bytes() -> int | None:
    """Give the part of the resident memory that is pages of files (libraries); None where the system does not say."""
    return _status("RssFile", ROOT)


def peak_bytes() -> int | None:
    """Give the most memory this process has held since it began or :func:`reset_peak`; None where nobody knows."""
    return _status("VmHWM", ROOT)


def reset_peak() -> bool:
    """Let :func:`peak_bytes` begin again from what is held now; tell whether the system does so."""
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


# ---- limits of the process ------------------------------------------------------------------------------


def _of_process(limits: Mapping[str, float], held: Occupied) -> Iterator[MemoryLimit]:
    """Give what each limit of a process leaves."""
    for name, command, count in RESOURCES:
        if name in limits:
            taken = getattr(held, count)
            reason = (
                f"each process may take {format_bytes(limits[name])} ({name}, {command}), "
                f"and a rank without a tensor takes {format_bytes(taken)} of them"
            )
            yield MemoryLimit(bytes=max(0.0, limits[name] - taken), reason=reason, per_process=True)


def _status(key: str, root: Path) -> int | None:
    """Read one line of this process's status, in bytes."""
    return _kilobytes(_read(root / "proc/self/status"), key)


def _private_bytes(root: Path) -> int:
    """Add up the pages that this process shares with no other; resident ones where it is not told."""
    text = _read(root / "proc/self/smaps_rollup")
    parts = [_kilobytes(text, key) for key in ("Private_Clean", "Private_Dirty")]
    if None not in parts:
        return sum(part or 0 for part in parts)
    return _status("VmRSS", root) or 0


# ---- the host ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Room:
    """Hold what one bound of the host leaves, and what it is in words."""

    free: float
    words: str


def _of_host(num_devices: int, own: int, root: Path) -> MemoryLimit:
    """Divide what the tightest bound of the host leaves among the devices."""
    rooms = [room for room in (_physical(root), *_control_groups(root)) if room is not None]
    if not rooms:
        return MemoryLimit(bytes=math.inf, reason="this system does not say how much memory it has", per_process=False)
    least = min(rooms, key=lambda room: room.free)
    parts = "" if num_devices == 1 else f", for {num_devices} devices"
    less = f", less {format_bytes(own)} that a rank without a tensor holds" if own else ""
    return MemoryLimit(
        bytes=max(0.0, least.free / num_devices - own), reason=f"{least.words}{parts}{less}", per_process=False
    )


def _physical(root: Path) -> _Room | None:
    text = _read(root / "proc/meminfo")
    total, available = _kilobytes(text, "MemTotal"), _kilobytes(text, "MemAvailable")
    if total is not None and available is not None:
        words = f"{format_bytes(available)} of this host's {format_bytes(total)} are available"
        return _Room(free=float(available), words=words)
    if total is None and root == ROOT:
        total = _system_pages()
    if total is None:
        return None
    return _Room(free=float(total), words=f"this host has {format_bytes(total)} (what others use is not known)")


def _system_pages() -> int | None:
    """Ask POSIX for the size of the memory, where there is no /proc."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _control_groups(root: Path) -> Iterator[_Room]:
    """Give what each control group that this process is in leaves, its own and all above it."""
    mounts = list(_mounts(root))
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        named = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        for version, inside, mount in mounts:
            if version == named:
                for folder in _way_up(path, inside, root / mount.lstrip("/")):
                    yield from _room_in(folder, version)


def _mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """List where memory control groups are mounted: (version, the group that is its root, the folder)."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            yield 1, fields[3], fields[4]


def _way_up(path: str, inside: str, mount: Path) -> Iterator[Path]:
    """List the folders of a group and of all above it, as far as this process may see them."""
    group = PurePosixPath(path)
    with contextlib.suppress(ValueError):  # else the group's true name is that of another namespace
        group = PurePosixPath("/") / group.relative_to(inside)
    folders = [mount / str(each).lstrip("/") for each in (group, *group.parents)]
    yield from (folder for folder in folders if ".." not in folder.parts and folder.is_dir())


LIMIT_FILES = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}
USAGE_FILES = {2: ("memory.current", "inactive_file"), 1: ("memory.usage_in_bytes", "total_inactive_file")}


def _room_in(folder: Path, version: int) -> Iterator[_Room]:
    """Give what the limits of one group leave."""
    usage_file, cache_key = USAGE_FILES[version]
    for name in LIMIT_FILES[version]:
        limit = _number(_read(folder / name))
        if limit is None or limit >= NO_LIMIT:
            continue
        usage = _number(_read(folder / usage_file)) or 0
        used = max(0, usage - _statistic(_read(folder / "memory.stat"), cache_key))
        words = (
            f"{format_bytes(max(0, limit - used))} of the {format_bytes(limit)} that this control group may use "
            f"({name}) are free"
        )
        yield _Room(free=float(max(0, limit - used)), words=words)


# ---- small files -------------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """Read a number; None for "max" and what is not one."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _kilobytes(text: str | None, key: str) -> int | None:
    """Read ``Key:   123 kB`` in bytes."""
    for line in (text or "").splitlines():
        if line.startswith(key + ":"):
            number = line.split()[1:2]
            return int(number[0]) * 1024 if number and number[0].isdigit() else None
    return None


def _statistic(text: str | None, key: str) -> int:
    """Read ``key 123``; nothing where there is no such line."""
    found = (line.split() for line in (text or "").splitlines())
    return next((int(pair[1]) for pair in found if len(pair) == 2 and pair[0] == key and pair[1].isdigit()), 0)
