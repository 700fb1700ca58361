"""What tests do with this machine: wait for a process to end, limit files, look for what is left."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def soon(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Poll until something holds; say whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let this process make no file larger than so many bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
