"""Checks that a graph repeats on every microbatch: what Python learnt from data in the trace must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import CaptureError


class Check:
    """Repeat a test on the data whose other outcome makes the forward raise, and raise then as it would."""

    def __init__(self, read: Callable[..., Any], expected: bool, error: Exception) -> None:
        self.read = read
        self.expected = expected
        self.error = error
        self.__name__ = f"check_{getattr(read, '__name__', 'data')}"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Test one microbatch. Raises what the forward itself raises for such data."""
        if bool(self.read(*args, **kwargs)) is not self.expected:
            raise self.error.with_traceback(None)


def check_shape(tensor: Tensor, shape: tuple[int, ...], module: str) -> None:
    """Raise CaptureError when a module that runs as a whole gives another shape than it did in the trace."""
    if tuple(tensor.shape) != tuple(shape):
        raise CaptureError(
            f'module "{module}" gave a tensor of shape {tuple(tensor.shape)} where {tuple(shape)} was '
            "expected: its shape depends on the data, and code outside of it is built on that shape. Move "
            "that code into the module, or give it an output of one shape."
        )
