"""Memory that several processes of one host map. It has no name, so nothing is left of it however they end.

A segment is an anonymous file of the kernel (``memfd_create``, Linux): it takes no room in ``/dev/shm`` and is gone
with the last process that maps it, also after ``kill -9``. Other processes reach it by its maker's ``/proc/PID/fd``.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
TOKEN_BYTES = 16  # at the end of a segment; tells that a path leads to the segment that was meant
ENTRY_BYTES = 8  # of /proc/PID/pagemap, one entry a page: bits 63 present, 62 swapped out, 61 the file's own page
PRESENT, SHARED = numpy.uint64(3 << 62), numpy.uint64(1 << 61)


class SharedMemoryError(OSError):
    """Report that memory cannot be shared here, and why."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Say how another process of this host reaches a segment."""

    path: str
    num_bytes: int
    token: bytes


class Segment:
    """Map one piece of shared memory. Made by one process with :meth:`create`, by others with :meth:`attach`.

    ``bytes`` is the memory as a flat uint8 tensor: what one process writes the others see (once they were told).
    """

    def __init__(self, descriptor: int, num_bytes: int, token: bytes) -> None:
        self.map = mmap.mmap(descriptor, _mapped(num_bytes))
        self.descriptor, self.num_bytes, self.token = descriptor, num_bytes, token  # this one's to close from now on
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)[:num_bytes]

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Make a segment of zeros; the kernel gives it memory as it is written.

        Raises SharedMemoryError where the platform has none or there is not that much memory.
        """
        if not hasattr(os, "memfd_create"):
            raise SharedMemoryError(f"shared memory without a name needs Linux, and this is {sys.platform}")
        _check_room(num_bytes)
        descriptor = -1
        try:
            descriptor = os.memfd_create("meshwise", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _mapped(num_bytes))
            token = secrets.token_bytes(TOKEN_BYTES)
            os.pwrite(descriptor, token, _mapped(num_bytes) - TOKEN_BYTES)
            return cls(descriptor, num_bytes, token)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise _no_room(num_bytes, error.strerror or str(error)) from error

    @classmethod
    def attach(cls, address: Address) -> Segment:
        """Map a segment that another process made and still holds.

        Raises SharedMemoryError where that process cannot be reached (another container, another user).
        """
        descriptor = -1
        try:
            descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
            found = os.pread(descriptor, TOKEN_BYTES, _mapped(address.num_bytes) - TOKEN_BYTES)
            if found != address.token:
                raise OSError(f"{address.path} is something else")
            return cls(descriptor, address.num_bytes, address.token)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise SharedMemoryError(f"another rank's memory cannot be mapped ({error.strerror or error})") from error

    @property
    def address(self) -> Address:
        """Say how other processes reach this segment while this one holds it."""
        return Address(
            path=f"/proc/{os.getpid()}/fd/{self.descriptor}", num_bytes=self.num_bytes, token=self.token
        )

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """View a part, from byte ``offset`` on (a multiple of the element's size)."""
        count = 1
        for size in shape:
            count *= size
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "descriptor"):
            os.close(self.descriptor)


class PrivateView:
    """Map a part of a segment so that own writes stay own: what others write shows through until then.

    For values that all ranks read and that the user may change: each rank sees its own change, as it would with
    a copy of its own. Raises SharedMemoryError where the kernel does not say which pages are own.
    """

    def __init__(self, segment: Segment, offset: int, num_bytes: int) -> None:
        assert offset % PAGE == 0
        self.num_bytes = num_bytes
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        self.map = mmap.mmap(segment.descriptor, _pages(num_bytes) * PAGE, flags, access, offset=offset)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)[:num_bytes]
        self.first_page = self.bytes.data_ptr() // PAGE
        try:
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(f"/proc/self/pagemap cannot be read ({error.strerror})") from error

    def changed(self) -> list[tuple[int, int]]:
        """List the ranges of bytes that this process has written to (whole pages)."""
        length, at = _pages(self.num_bytes) * ENTRY_BYTES, self.first_page * ENTRY_BYTES
        entries = numpy.frombuffer(os.pread(self.pagemap, length, at), dtype=numpy.uint64)
        if (entries & SHARED).all():  # as it is nearly always
            return []
        own = ((entries & PRESENT) != 0) & ((entries & SHARED) == 0)
        if not own.any():
            return []
        edges = numpy.flatnonzero(numpy.diff(own.astype(numpy.int8), prepend=0, append=0))
        return [(int(a) * PAGE, min(int(b) * PAGE, self.num_bytes)) for a, b in edges.reshape(-1, 2)]

    def forget(self, ranges: list[tuple[int, int]]) -> None:
        """Drop own changes: the shared values show again."""
        for start, stop in ranges:
            self.map.madvise(mmap.MADV_DONTNEED, start, -(-stop // PAGE) * PAGE - start)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "pagemap"):
            os.close(self.pagemap)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE)


def _mapped(num_bytes: int) -> int:
    """Count the bytes of a segment's file: whole pages, with the token at the end."""
    return _pages(num_bytes + TOKEN_BYTES) * PAGE


# ---- room ----------------------------------------------------------------------------------------


def _check_room(num_bytes: int) -> None:
    """Refuse what cannot be there: the kernel would end processes to find memory for it."""
    free = free_memory()
    if num_bytes > free:
        raise _no_room(num_bytes, f"{free / 2**20:.1f} MiB are free")


def _no_room(num_bytes: int, why: str) -> SharedMemoryError:
    return SharedMemoryError(f"{num_bytes / 2**20:.1f} MiB of shared memory cannot be had here ({why})")


def free_memory() -> int:
    """Count the bytes that this process may still take: what the host has, and its control group's limit."""
    found = [sys.maxsize, *_host_memory(), *_group_memory()]
    return max(0, min(found))


def _host_memory() -> list[int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _group_memory() -> list[int]:
    """Give what is left to this process' control group (version 2), if it has a limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        folder = folder if (folder / "memory.max").exists() else Path("/sys/fs/cgroup")
        limit = (folder / "memory.max").read_text().strip()
        return [] if limit == "max" else [int(limit) - int((folder / "memory.current").read_text())]
    except (OSError, ValueError):
        return []
