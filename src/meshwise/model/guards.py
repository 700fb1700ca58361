"""Calls in a graph beside the recorded ones: checks of each microbatch, and a kind of wrapper."""

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


class Fresh:
    """Make a call whose result is, for some batch sizes, its very argument give a tensor of its own always."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run it."""
        result: Tensor = self.function(tensor, *args, **kwargs)
        return result.view_as(result) if result is tensor else result


def check_shape(tensor: Tensor, shape: tuple[int, ...], module: str) -> None:
    """Raise CaptureError when a module that runs as a whole gives another shape than it did in the trace."""
    if tuple(tensor.shape) != tuple(shape):
        raise CaptureError(
            f'module "{module}" gave a tensor of shape {tuple(tensor.shape)} where {tuple(shape)} was '
            "expected: its shape depends on the data, and code outside of it is built on that shape. Move "
            "that code into the module, or give it an output of one shape."
        )
