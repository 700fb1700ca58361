"""Route what torch's function modes do not see through a recorder: modules, own functions, TorchScript."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .recorder import Recorder

_LOCK = threading.RLock()


def _named(run: Any, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    call.__name__ = name
    return call


@contextlib.contextmanager
def patched_calls(recorder: Recorder) -> Iterator[None]:
    """Route module calls, custom autograd functions and script functions through ``recorder`` for a while."""
    original_call = nn.Module.__call__
    original_apply = torch.autograd.Function.__dict__["apply"]
    original_script = torch.jit.ScriptFunction.__call__

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module_call(module, original_call, args, kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original_apply.__get__(None, cls)
        return recorder.whole_call(_named(run, cls.__name__), run, cls.__name__, args, kwargs)

    def script_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        run = original_script.__get__(function, type(function))
        return recorder.whole_call(function, run, function.name, args, kwargs)

    with _LOCK:
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(function_apply)  # type: ignore[method-assign,assignment]
        torch.jit.ScriptFunction.__call__ = script_call  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]
            torch.jit.ScriptFunction.__call__ = original_script  # type: ignore[method-assign]
