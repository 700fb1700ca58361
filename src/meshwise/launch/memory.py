"""Let the C library keep the memory that a rank frees, since its next step asks for the same again.

By default glibc gives large free blocks back to the kernel, which hands them out again page by page, zeroed: on
a CPU that costs up to a tenth of a step. The peak of a rank's memory is the same either way.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
LARGEST_TRIM, LARGEST_MMAP = (1 << 31) - 1, 32 << 20  # bytes; the largest values that it takes
CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> None:
    """Raise glibc's thresholds in this process, unless the environment sets them; elsewhere do nothing."""
    if sys.platform != "linux" or any(name in os.environ for name in CHOICES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, LARGEST_TRIM)
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP)
