"""Nested values (dict, list, tuple, named tuple, dataclass) as a flat list of leaves and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Path = tuple[tuple[str, Any], ...]


def is_namedtuple(value: Any) -> bool:
    """Tell whether ``value`` is an instance of a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_dataclass_value(value: Any) -> bool:
    """Tell whether ``value`` is an instance (not the class) of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def children(value: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    """List the children of a container with their steps, or None for a leaf.

    A step is ``("item", key)`` for ``value[key]`` or ``("attr", name)`` for ``value.name``.
    """
    if isinstance(value, Mapping):
        return [(("item", k), value[k]) for k in value]
    if is_namedtuple(value):
        return [(("attr", f), getattr(value, f)) for f in value._fields]
    if isinstance(value, (list, tuple)) and not type(value).__module__.startswith("torch"):
        return [(("item", i), v) for i, v in enumerate(value)]
    if isinstance(value, (list, tuple)):  # torch.Size and the torch.return_types
        return [(("item", i), v) for i, v in enumerate(value)]
    if is_dataclass_value(value) and not getattr(type(value), "is_leaf", False):
        return [(("attr", f.name), getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Rebuild ``value`` with ``function`` applied to every leaf; containers keep their class."""
    if isinstance(value, slice):
        return slice(*(map_leaves(function, v) for v in (value.start, value.stop, value.step)))
    kids = children(value)
    if kids is None:
        return function(value)
    return _rebuild(value, [map_leaves(function, child) for _, child in kids])


def _rebuild(value: Any, parts: list[Any]) -> Any:
    if is_namedtuple(value):
        return type(value)(*parts)
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, parts)
    if is_dataclass_value(value):
        return _rebuild_dataclass(value, parts)
    if isinstance(value, list):
        return list(parts) if type(value) is not list else parts
    return tuple(parts)


def _rebuild_mapping(value: Mapping[Any, Any], parts: list[Any]) -> Any:
    items = dict(zip(value, parts, strict=True))
    if type(value) is dict or not is_dataclass_value(value):
        return items if type(value) is dict else _like_mapping(value, items)
    return type(value)(**items)  # an OrderedDict that is also a dataclass


def _like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    clone = copy.copy(value)
    for key, item in items.items():
        clone[key] = item  # type: ignore[index]
    return clone


def _rebuild_dataclass(value: Any, parts: list[Any]) -> Any:
    clone = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(clone, field.name, part)
    return clone


def leaves_with_paths(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """List every leaf of ``value`` with the steps that lead to it, in a fixed order."""
    kids = children(value)
    if kids is None:
        return [(path, value)]
    found: list[tuple[Path, Any]] = []
    for step, child in kids:
        found.extend(leaves_with_paths(child, (*path, step)))
    return found


def leaves(value: Any) -> list[Any]:
    """List every leaf of ``value`` in a fixed order."""
    found: list[Any] = []
    _gather_leaves(value, found)
    return found


def _gather_leaves(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is list or kind is tuple:  # by far the most common: every step goes through here
        for child in value:
            _gather_leaves(child, found)
        return
    kids = children(value)
    if kids is None:
        found.append(value)
        return
    for _, child in kids:
        _gather_leaves(child, found)


def replace_leaves(value: Any, new: list[Any]) -> Any:
    """Rebuild ``value`` with its leaves replaced, in the order of :func:`leaves`."""
    source = iter(new)
    return map_leaves(lambda _: next(source), value)
