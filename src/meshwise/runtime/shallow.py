"""Count a deep model by a few of its layers, where they are alike; one layer more shows whether that holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..cost.deepen import deepened
from ..cost.profile import Profile
from ..errors import MeshwiseError
from ..job import Job
from .counted import count_sizes

FEW, DEEP = 3, 12  # layers that are counted; layers from which that is worth it


def count_shallow(job: Job, model: nn.Module, batches: Sequence[Any]) -> list[Profile] | None:
    """Count a model at several sizes by a few layers; None where its layers are not alike, or do not act alike."""
    path = repeated_layers(model)
    if path is None:
        return None
    layers = model.get_submodule(path)
    try:
        with cut_to(layers, FEW):
            few = count_sizes(job, model, batches)
        with cut_to(layers, FEW + 1):
            (more,) = count_sizes(job, model, batches[:1])
        predicted = deepened(few[0], path, FEW + 1)
    except (MeshwiseError, LookupError, TypeError, ValueError, RuntimeError):
        return None
    if predicted.units != more.units or predicted.parameters != more.parameters or few[0].notes or more.notes:
        return None
    extra = len(layers._modules) - FEW
    return [_whole(p, path, FEW + extra, few[0], more, extra) for p in few]


def _whole(profile: Profile, path: str, layers: int, few: Profile, more: Profile, extra: int) -> Profile:
    names = {*few.uncounted, *more.uncounted}
    each = {n: more.uncounted.get(n, 0) - few.uncounted.get(n, 0) for n in names}
    return replace(
        deepened(profile, path, layers),
        buffer_bytes=few.buffer_bytes + (more.buffer_bytes - few.buffer_bytes) * extra,
        uncounted={n: few.uncounted.get(n, 0) + each[n] * extra for n in sorted(names)},
    )


def repeated_layers(model: nn.Module) -> str | None:
    """Find the longest list of modules that are alike: same classes, same parameters and buffers, nothing shared."""
    best: tuple[int, str] = (DEEP - 1, "")
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and path and len(module) > best[0]:
            shapes = [_shape(m) for m in module]
            held = [id(t) for m in module for t in (*m.parameters(), *m.buffers())]
            if all(s == shapes[0] for s in shapes) and len(set(held)) == len(held):
                best = (len(module), path)
    return best[1] or None


def _shape(module: nn.Module) -> list[Any]:
    kinds: list[Any] = [(n, type(m), m.training) for n, m in module.named_modules()]
    tensors = (*module.named_parameters(), *module.named_buffers())
    return kinds + [(n, t.shape, t.dtype, t.requires_grad) for n, t in tensors]


@contextlib.contextmanager
def cut_to(layers: nn.Module, count: int) -> Iterator[None]:
    """Leave only the first so many layers of a list while this is open."""
    held = dict(layers._modules)
    try:
        for name in list(held)[count:]:
            del layers._modules[name]
        yield
    finally:
        layers._modules.clear()
        layers._modules.update(held)
