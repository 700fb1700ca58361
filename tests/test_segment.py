"""Memory without a name: what processes see of one another's writes, what is refused, and that nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from machine import file_size_limit
from meshwise.parallel import segment as memory
from meshwise.parallel.segment import PAGE, Address, PrivateView, Segment, SharedMemoryError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name needs Linux")


def filled(num_pages: int) -> Segment:
    """Make a segment in which every byte of page k is k + 1."""
    segment = Segment.create(num_pages * PAGE)
    for k in range(num_pages):
        segment.bytes[k * PAGE : (k + 1) * PAGE] = k + 1
    return segment


def descriptors() -> int:
    """Count this process' open files."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- segments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE - 16, PAGE - 15, PAGE, 3 * PAGE + 5])
def test_two_maps_see_each_others_writes(num_bytes: int) -> None:
    """A segment begins as zeros, has the size that was asked for, and both maps of it are the same memory."""
    mine = Segment.create(num_bytes)
    other = Segment.attach(mine.address)
    assert mine.bytes.shape == other.bytes.shape == (num_bytes,)
    assert not mine.bytes.any() and not other.bytes.any()
    mine.bytes[: num_bytes // 2] = 7
    other.bytes[num_bytes // 2 :] = 9
    assert torch.equal(mine.bytes, other.bytes)
    assert Segment.attach(other.address).token == mine.token  # the first map's token is still in its place


def test_parts_are_tensors_of_any_kind() -> None:
    """A part viewed in a dtype and shape is the memory itself; a part of no elements is one too."""
    segment = Segment.create(1000)
    segment.tensor(64, (2, 3), torch.float64)[1, 2] = 2.5
    assert Segment.attach(segment.address).tensor(64 + 40, (), torch.float64).item() == 2.5
    assert segment.tensor(0, (0, 4), torch.int16).shape == (0, 4)


def _hold(line: Any) -> None:
    """Make a segment in a child process, tell of it, and end when told to."""
    segment = Segment.create(100)
    segment.bytes[:] = 5
    line.send(segment.address)
    line.recv()
    line.send(int(segment.bytes[0]))
    line.recv()


def test_another_process_is_reached_as_long_as_it_lives() -> None:
    """A child's memory is mapped both ways; once the child is gone a new map is refused, and the old one stays."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_hold, args=(there,), daemon=True)
    child.start()
    address: Address = here.recv()
    segment = Segment.attach(address)
    assert segment.bytes.tolist() == [5] * 100
    segment.bytes[0] = 6
    here.send("look")
    assert here.recv() == 6
    here.send("end")
    child.join(10)
    assert child.exitcode == 0
    with pytest.raises(SharedMemoryError, match=r"^another rank's memory cannot be mapped \(No such file"):
        Segment.attach(address)
    assert segment.bytes[1] == 5


def test_what_is_not_meant_is_refused(tmp_path: Any) -> None:
    """A path that leads to other memory, to another file or to less memory than was said is refused."""
    segment, file = Segment.create(100), tmp_path / "file"
    file.write_bytes(bytes(PAGE))
    before = descriptors()
    for wrong in (
        replace(segment.address, token=bytes(16)),
        replace(segment.address, path=str(file)),
        replace(segment.address, num_bytes=10 * PAGE),
    ):
        with pytest.raises(SharedMemoryError, match="is something else"):
            Segment.attach(wrong)
    assert descriptors() == before


def test_more_than_there_is_is_refused_before_any_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment larger than what is free is refused in figures, without asking the kernel."""

    def never(*arguments: Any) -> int:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(os, "memfd_create", never)
    with pytest.raises(SharedMemoryError, match=r"1073741824.0 MiB of shared memory cannot be had here \(\d+.* MiB"):
        Segment.create(1 << 50)
    monkeypatch.setattr(memory, "free_memory", lambda: 5 * 2**20)
    with pytest.raises(SharedMemoryError, match=r"^6.0 MiB .* \(5.0 MiB are free\)$"):
        Segment.create(6 * 2**20)


def test_the_least_of_all_limits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free is what the host and the control group leave, never less than nothing; unknown limits do not count."""
    assert 0 < memory.free_memory() < 1 << 50
    monkeypatch.setattr(memory, "_host_memory", lambda: [5000])
    monkeypatch.setattr(memory, "_group_memory", lambda: [])
    assert memory.free_memory() == 5000
    monkeypatch.setattr(memory, "_group_memory", lambda: [-1])
    assert memory.free_memory() == 0


def test_a_limit_of_the_system_is_refused() -> None:
    """Where files may not be that large a segment is refused with the system's reason, and no file stays open."""
    before = descriptors()
    with file_size_limit(10 * PAGE), pytest.raises(SharedMemoryError, match="^1.0 MiB .*File too large"):
        Segment.create(1 << 20)
    assert descriptors() == before


def test_a_map_that_is_refused_closes_its_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no room for a map, nothing stays open and no other file is closed in its place."""
    known = Segment.create(10)
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    for make in (lambda: Segment.create(100), lambda: Segment.attach(known.address)):
        with pytest.raises(SharedMemoryError, match="Cannot allocate memory"):
            make()
        gc.collect()
        assert len(closed) == 1
        closed.clear()


def test_nothing_is_left_of_a_segment() -> None:
    """A segment has no name anywhere, not in /dev/shm either, and is gone with the last tensor of it."""
    before = descriptors()
    segment = filled(3)
    facts = os.fstat(segment.descriptor)
    assert os.readlink(segment.address.path) == "/memfd:meshwise (deleted)" and facts.st_nlink == 0
    assert facts.st_dev != os.stat("/dev/shm").st_dev  # it is not there under any name
    other = Segment.attach(segment.address)
    part = other.bytes[5:10]
    del segment, other
    assert part.tolist() == [1] * 5 and f" {facts.st_ino} " in Path("/proc/self/maps").read_text()
    del part
    assert descriptors() == before
    assert f" {facts.st_ino} " not in Path("/proc/self/maps").read_text()


# ---- private views -----------------------------------------------------------------------------------


def test_own_writes_stay_own_until_they_are_forgotten() -> None:
    """A page that was written to is this view's own; all other pages show what others write, also later."""
    segment = filled(6)
    view = PrivateView(segment, 0, 6 * PAGE)
    assert view.changed() == []
    assert view.bytes[::PAGE].tolist() == [1, 2, 3, 4, 5, 6]
    assert view.changed() == []  # reading changes nothing
    view.bytes[PAGE + 3] = 50
    view.bytes[3 * PAGE - 1 : 3 * PAGE + 1] = 60
    view.bytes[5 * PAGE :] = view.bytes[5 * PAGE :].clone()  # the same value: written all the same
    segment.bytes[:] = 100
    assert view.changed() == [(PAGE, 4 * PAGE), (5 * PAGE, 6 * PAGE)]
    assert view.bytes[[0, PAGE, PAGE + 3, 3 * PAGE - 1, 3 * PAGE, 4 * PAGE, 5 * PAGE]].tolist() == [
        *(100, 2, 50, 60, 60, 100, 6)
    ]
    assert (segment.bytes == 100).all()
    view.forget([(PAGE, 2 * PAGE)])
    assert view.changed() == [(2 * PAGE, 4 * PAGE), (5 * PAGE, 6 * PAGE)]
    view.forget(view.changed())
    assert view.changed() == [] and (view.bytes == 100).all()
    segment.bytes[7] = 101
    assert view.bytes[7] == 101


def test_a_part_of_a_segment_that_ends_inside_a_page() -> None:
    """A view begins at a page and ends anywhere: what has changed ends where the view does."""
    segment = filled(4)
    view = PrivateView(segment, PAGE, 2 * PAGE + 10)
    assert view.bytes.shape == (2 * PAGE + 10,) and view.bytes[0] == 2 and view.bytes[-1] == 4
    view.bytes[-1] = 9
    view.bytes[0] = 8
    assert view.changed() == [(0, PAGE), (2 * PAGE, 2 * PAGE + 10)]
    view.forget(view.changed())
    assert view.bytes[-1] == 4 and view.bytes[0] == 2


def test_views_of_two_owners_know_nothing_of_each_other() -> None:
    """Each rank's own writes are its own: another view of the same pages has none."""
    segment = filled(2)
    first, second = (PrivateView(segment, 0, 2 * PAGE) for _ in range(2))
    first.bytes[0] = 9
    assert first.changed() == [(0, PAGE)] and second.changed() == []
    assert second.bytes[0] == 1
    second.bytes[PAGE] = 9
    first.forget(first.changed())
    assert first.changed() == [] and second.changed() == [(PAGE, 2 * PAGE)]


def test_a_process_that_cannot_tell_own_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not say which pages are own, a private view is refused."""
    segment = filled(1)

    def refuse(*arguments: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SharedMemoryError, match=r"^/proc/self/pagemap cannot be read \(Operation not permitted\)"):
        PrivateView(segment, 0, PAGE)
