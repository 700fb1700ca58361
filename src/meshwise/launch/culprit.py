"""Finding the smallest part of a value that cannot be sent to the ranks, and its path in the user's words."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from meshwise.launch import ship


def explain(value: Any, error: Exception, what: str = "") -> str:
    """Say which part of a value cannot be sent, why, and what to do; ``error`` is what pickling raised."""
    path, part, error = find(value, error, what)
    return (
        f"{path or 'this'} ({type(part).__name__}) cannot be sent to the ranks: {error}; "
        "open it lazily in __getitem__ or pass a function that builds the dataset (or the model)"
    )


def find(value: Any, error: Exception, path: str = "") -> tuple[str, Any, Exception]:
    """Descend into the first part that fails, until no part of it fails: that is the culprit."""
    seen = {id(value)}
    while True:
        for name, part in parts(value):
            failure = None if id(part) in seen else _failure(part)
            seen.add(id(part))
            if failure is not None:
                value, error, path = part, failure, _join(path, name)
                break
        else:
            return path, value, error


def _failure(part: Any) -> Exception | None:
    try:
        ship.dump(part, _Nowhere())
    except Exception as error:  # noqa: BLE001 - whatever an object's own reducer raises
        return error
    return None


class _Nowhere:
    """Take what is written and forget it."""

    def write(self, data: Any) -> int:
        return len(data)


def _join(path: str, name: str) -> str:
    """Write a step down the path; a step without a name (a part of a bound call) is not written."""
    if not name or not path or name.startswith("["):
        return path + name
    return f"{path}.{name}"


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Name the direct parts of a value that travel with it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from (("", part) for part in (value.args, value.keywords))
    elif isinstance(value, type):
        yield from vars(value).items()
    else:
        yield from _attributes(value)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Name the variables of a function's closure, the globals it uses and its default arguments."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from ((f"{function.__name__} default", item) for item in function.__defaults__ or ())


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Name an object's attributes, a module's layers and weights among them, or its pickled state."""
    if isinstance(value, nn.Module):
        for group in (value._modules, value._parameters, value._buffers):
            yield from group.items()
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
