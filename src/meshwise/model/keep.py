"""Leave the model as it was: what a capture's forwards change is put back."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from .looks import generators_of
from .watch import is_fake

PLAIN = (int, float, bool, str)
CONTAINERS = (dict, OrderedDict, list, set)


def python_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Note the attributes of every module."""
    return {path: dict(vars(module)) for path, module in model.named_modules()}


def changed_attributes(model: nn.Module, before: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """List ``(module path, attribute)`` of plain Python values that a forward changed."""
    changed = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            old = before.get(path, {}).get(name, value)
            if type(value) in PLAIN and (type(old) is not type(value) or old != value):
                changed.append((path, name))
    return changed


@contextlib.contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, attributes and random states back in the end."""
    attributes = {module: dict(vars(module)) for module in model.modules()}
    contents = [(v, v.copy()) for held in attributes.values() for v in held.values() if type(v) in CONTAINERS]
    tensors = {id(t): (t, t.detach().clone()) for m in model.modules() for t in _held_tensors(m)}
    generators = [(g, g.get_state()) for g in generators_of(model)]
    states = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        for module, values in attributes.items():
            module.__dict__.clear()
            module.__dict__.update(values)
        for container, old in contents:
            _refill(container, old)
        for tensor, old in tensors.values():
            if not is_fake(tensor) and not torch.equal(tensor, old):
                tensor.data.copy_(old)  # not seen by autograd: a cell may hold it for its backward
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(states[0])
        numpy.random.set_state(states[1])


def _refill(container: Any, old: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(old)
    else:
        container.update(old)


def _held_tensors(module: nn.Module) -> list[Tensor]:
    held = [b for b in module._buffers.values() if b is not None]
    held += [v for v in vars(module).values() if isinstance(v, Tensor) and v.is_leaf]
    return [t for t in held if t.device.type != "meta"]


@contextlib.contextmanager
def as_in_export() -> Iterator[None]:
    """Tell libraries that ask that a graph is being captured, so that they leave checks of the data out."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
