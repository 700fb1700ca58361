"""How much memory a device may use: the host's, a control group's, a process's; and what a process has used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.hardware.limits import (
    MemoryLimit,
    Occupied,
    device_memory,
    occupied,
    peak_bytes,
    reset_peak,
    resident_bytes,
)

MIB, GIB = 1 << 20, 1 << 30
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

STATUS = "Name:\tpython\nVmSize:\t 4194304 kB\nVmHWM:\t 8 kB\nVmRSS:\t 524288 kB\nVmData:\t 1048576 kB\n"
V2_MOUNT = "31 23 0:28 {inside} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _host(root: Path, *, available: int = 16 * GIB, cgroup: str = "", mounts: str = "") -> Path:
    """Pretend a host with 32 GiB."""
    return _write(
        root,
        {
            "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n",
            "proc/self/status": STATUS,
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": "23 1 0:21 / / rw - ext4 /dev/root rw\n" + mounts,
        },
    )


def _ask(root: Path, devices: int = 2, **options: object) -> MemoryLimit:
    return device_memory(devices, root=root, limits=options.pop("limits", {}), **options)  # type: ignore[arg-type]


def test_devices_share_what_is_available(tmp_path: Path) -> None:
    """Without any limit each device gets its part of MemAvailable, and the reason has the numbers."""
    limit = _ask(_host(tmp_path))
    assert limit.bytes == 8 * GIB and not limit.per_process
    assert "16 GiB of this host's 32 GiB" in limit.reason.replace("16.0", "16").replace("32.0", "32")
    assert "for 2 devices" in limit.reason


def test_what_a_fresh_rank_holds_is_taken_off_its_part(tmp_path: Path) -> None:
    """Each device loses what a rank without a tensor takes for itself."""
    assert _ask(_host(tmp_path), fresh=Occupied(own=512 * MIB)).bytes == 7.5 * GIB


def test_a_control_group_of_version_2_bounds_the_host(tmp_path: Path) -> None:
    """memory.max counts, less what the group holds; file cache that can be dropped is no holding."""
    root = _host(tmp_path, cgroup="0::/jobs/mine\n", mounts=V2_MOUNT.format(inside="/"))
    files = {"memory.max": f"{4 * GIB}\n", "memory.current": f"{2 * GIB}\n", "memory.stat": f"inactive_file {GIB}\n"}
    _write(root, {f"sys/fs/cgroup/jobs/mine/{name}": text for name, text in files.items()})
    limit = _ask(root)
    assert limit.bytes == 1.5 * GIB and "memory.max" in limit.reason


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    """A limit of a group above binds where the own one says max, and so does memory.high."""
    root = _host(tmp_path, cgroup="0::/jobs/mine\n", mounts=V2_MOUNT.format(inside="/"))
    _write(
        root,
        {
            "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
            "sys/fs/cgroup/jobs/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.high": f"{6 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{2 * GIB}\n",
        },
    )
    limit = _ask(root)
    assert limit.bytes == 2 * GIB and "memory.high" in limit.reason


@pytest.mark.parametrize("inside", ["/", "/docker/abc"])
def test_a_control_group_of_version_1_bounds_the_host(tmp_path: Path, inside: str) -> None:
    """memory.limit_in_bytes counts, also where the container sees its own group as the root."""
    root = _host(tmp_path, cgroup="4:memory:/docker/abc\n1:cpu:/other\n", mounts=V1_MOUNT.format(inside=inside))
    folder = "sys/fs/cgroup/memory" + ("/docker/abc" if inside == "/" else "")
    _write(
        root,
        {
            f"{folder}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{folder}/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{folder}/memory.stat": f"cache {GIB}\ntotal_inactive_file {GIB}\n",
        },
    )
    assert _ask(root, 1).bytes == 2 * GIB


def test_no_limit_of_version_1_is_none(tmp_path: Path) -> None:
    """The huge number that stands for no limit is not taken for one."""
    root = _host(tmp_path, cgroup="4:memory:/\n", mounts=V1_MOUNT.format(inside="/"))
    _write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert _ask(root).bytes == 8 * GIB


@pytest.mark.parametrize(("name", "left"), [("RLIMIT_AS", 2 * GIB), ("RLIMIT_DATA", 5 * GIB)])
def test_a_limit_of_the_process_is_not_divided(tmp_path: Path, name: str, left: int) -> None:
    """What ulimit allows holds for each rank by itself, less what a fresh rank takes of that very count."""
    limit = _ask(_host(tmp_path), limits={name: 6.0 * GIB})
    assert limit.bytes == left and limit.per_process and name in limit.reason
    fresh = Occupied(address_space=5 * GIB, data=3 * GIB)
    limit = _ask(_host(tmp_path), limits={name: 6.0 * GIB}, fresh=fresh)
    assert limit.bytes == (GIB if name == "RLIMIT_AS" else 3 * GIB)


def test_a_full_host_leaves_nothing_and_not_less(tmp_path: Path) -> None:
    """No figure is below 0."""
    assert _ask(_host(tmp_path, available=0), fresh=Occupied(own=GIB)).bytes == 0
    assert _ask(_host(tmp_path), limits={"RLIMIT_AS": 1.0 * GIB}).bytes == 0


def test_where_nothing_is_known_there_is_no_limit_and_a_reason(tmp_path: Path) -> None:
    """Without /proc the limit is infinite, in words; that of the process still counts."""
    limit = _ask(tmp_path)
    assert limit.bytes == float("inf") and "does not say" in limit.reason
    assert _ask(tmp_path, limits={"RLIMIT_AS": 1.0 * GIB}).bytes == GIB
    assert occupied(tmp_path) == Occupied()


def test_an_accelerator_counts_its_own_memory(tmp_path: Path) -> None:
    """What its library says is free is what a device may use."""
    limit = _ask(_host(tmp_path), accelerator=(70 * GIB, 80 * GIB))
    assert limit.bytes == 70 * GIB and limit.per_process and "80.0 GiB" in limit.reason


@linux
def test_a_process_with_a_real_limit_finds_it() -> None:
    """A child that sets RLIMIT_AS and RLIMIT_DATA is told so, and can take most of what it is told."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (300 << 20, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, resource.RLIM_INFINITY))
from meshwise.hardware.limits import device_memory
limit = device_memory(1)
assert limit.per_process and "RLIMIT_DATA" in limit.reason, limit
assert 100 << 20 < limit.bytes < 200 << 20, limit
taken = bytearray(int(limit.bytes) - (8 << 20))
try:
    bytearray(16 << 20)
except MemoryError:
    print("bound")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "bound\n", done.stderr


@linux
def test_a_new_peak_begins_when_asked() -> None:
    """After a reset the peak is near what is held now, and it grows with what is written."""
    before = bytearray(b"x") * (64 * MIB)
    high = peak_bytes()
    del before
    if not reset_peak():
        pytest.skip("the system does not let the peak begin again")
    low, now = peak_bytes(), resident_bytes()
    assert high is not None and low is not None and now is not None
    assert low < high and abs(low - now) < 16 * MIB
    held = bytearray(b"x") * (64 * MIB)
    peak = peak_bytes()
    assert peak is not None and peak >= low + len(held) - 8 * MIB
