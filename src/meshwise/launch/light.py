"""Leave torch's compiler out of a rank that compiles nothing: importing it takes as long as the rest of torch.

Optimizers and dispatch modes ask the compiler not to look into some of their functions, and import it to ask. As
long as nothing has imported it there is nothing to ask: the functions run as they are, and from the moment that it
is there they run as torch wrote them. Where a torch is written otherwise than expected, nothing is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer, optimizer
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[..., Any]
_DISABLED = "__dynamo_disable"  # where torch keeps what it asked the compiler for


def leave_compiler_out() -> None:
    """Let optimizers and dispatch modes that exist by now work without importing the compiler."""
    if _has_compiler():
        return
    hidden, graded = _code(torch, "_disable_dynamo"), _code(optimizer, "_use_grad_for_differentiable")
    for cls in {*_family(Optimizer), *_family(TorchDispatchMode)}:
        for name, function in list(vars(cls).items()):
            code, plain = getattr(function, "__code__", None), getattr(function, "__wrapped__", None)
            if code is None or plain is None:
                continue
            if code is hidden and not hasattr(plain, _DISABLED):
                setattr(plain, _DISABLED, _shortcut(function, plain))
            elif code is graded:
                setattr(cls, name, _without_breaks(function, plain))


def _has_compiler() -> bool:
    """Say whether the compiler is imported, and wholly; asking torch for it as an attribute would import it."""
    return "_dynamo" in vars(torch)


def _code(module: Any, decorator: str) -> Any:
    """Return the code that all functions share which a decorator made, or a mark that no function has."""
    try:
        return getattr(module, decorator)(_nothing).__code__
    except (AttributeError, TypeError):
        return object()


def _nothing() -> None:
    """Stand for a function to decorate."""


def _family(cls: Any) -> Iterator[type]:
    yield cls
    for below in cls.__subclasses__():
        yield from _family(below)


def _shortcut(decorated: Function, plain: Function) -> Function:
    """Run the plain function; once the compiler is there, forget this and ask it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_compiler():
            return plain(*args, **kwargs)
        if getattr(plain, _DISABLED, None) is call:
            delattr(plain, _DISABLED)
        return decorated(*args, **kwargs)

    return call


def _without_breaks(decorated: Function, plain: Function) -> Function:
    """Run an optimizer's step with gradients as it wants them, without the breaks that only a compiler sees."""

    @functools.wraps(decorated)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _has_compiler():
            return decorated(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return step
