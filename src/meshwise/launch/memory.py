"""Let the C library keep the memory that a rank frees, since its next step asks for the same again.

By default glibc gives large free blocks back to the kernel, which hands them out again page by page, zeroed: on a CPU
that costs up to a sixth of a step. The peak of a rank's memory is the same either way. Large pages on top of it
(``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``) were measured to give nothing more, and to take more memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
LARGEST_TRIM, LARGEST_MMAP = (1 << 31) - 1, 32 << 20  # bytes; the largest values that it takes
USUAL_TRIM = 2 * LARGEST_MMAP  # bytes; where glibc arrives by itself in a process that frees large blocks
CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> None:
    """Raise glibc's thresholds in this process, unless the environment sets them; elsewhere do nothing."""
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, LARGEST_TRIM)
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory while this is open, in a process that goes on afterwards; give it back at the end."""
    keep_freed_memory()
    try:
        yield
    finally:
        mallopt, trim = _function("mallopt"), _function("malloc_trim")
        if mallopt is not None and trim is not None:
            mallopt(TRIM_THRESHOLD, USUAL_TRIM)
            trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """Find a function of the C library, where its behaviour is ours to change."""
    if sys.platform != "linux" or any(choice in os.environ for choice in CHOICES):
        return None
    return getattr(ctypes.CDLL(None), name, None)
