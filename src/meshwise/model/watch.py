"""See the operators below torch's Python calls: hidden inputs, data read in C++, calls never shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..tree import leaves

if TYPE_CHECKING:
    from .recorder import Recorder

ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
BOOLEANS = (torch.bool, torch.uint8)


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors inside nested arguments."""
    found: list[Tensor] = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, slice):
            found.extend(tensors_in((leaf.start, leaf.stop, leaf.step)))
    return found


def storage_of(tensor: Tensor) -> int | None:
    """Name the memory of a tensor; None for one without a single strided piece (sparse, functorch's own)."""
    with torch._C.DisableTorchFunction():
        if tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None


def is_fake(value: Any) -> bool:
    """Tell whether a tensor has a shape and no values (by name: its module is slow to import)."""
    return type(value).__name__ == "FakeTensor" or (isinstance(value, Tensor) and value.device.type == "meta")


def in_fake_mode() -> bool:
    """Tell whether new tensors have no memory; then generators are never drawn from."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_transform() -> bool:
    """Tell whether a functorch transform (vmap, grad, ...) is on."""
    return torch._C._functorch.peek_interpreter_stack() is not None


TRANSFORMS = ("torch._functorch.vmap", "torch._functorch.eager_transforms")


def called_in_transform() -> bool:
    """Tell the same below the transforms, which hide themselves from what they call."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in TRANSFORMS:
            return True
    return False


def shaping(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the tensors whose values decide the shape (or the Python number) that an operator gives."""
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output not in tags and torch.Tag.dynamic_output_shape not in tags:
        return []
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten._unsafe_index):
        return [t for t in tensors_in((args[1:], kwargs)) if t.dtype in BOOLEANS]
    return tensors_in((args, kwargs))


@dataclass(kw_only=True)
class Scope:
    """Follow what happens inside one recorded call.

    ``allowed`` are the tensors that the call may touch (None: any); ``keep``: remember all it makes, because
    it may hand some of it on in other ways than by returning it.
    """

    allowed: Iterable[Tensor] | None
    keep: bool = False
    since: int = 0
    data_shaped: bool = False
    hidden: bool = False
    touched: bool = False  # an operator took one of the allowed tensors
    ids: set[int] = field(default_factory=set)
    storages: set[int | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        for tensor in self.allowed or ():
            self.ids.add(id(tensor))
            self.storages.add(storage_of(tensor))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Report every operator to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        scope = self.recorder.scope
        if scope is None:
            return self.recorder.loose_operator(func, args, kwargs)
        self._look(scope, func, args, kwargs)
        result = func(*args, **kwargs)
        if scope.keep:
            for tensor in tensors_in(result):
                self.recorder.note_storage(tensor)
        return result

    def _look(self, scope: Scope, func: Any, args: Any, kwargs: Any) -> None:
        scope.data_shaped |= any(self.recorder.is_tainted(t) for t in shaping(func, args, kwargs))
        if scope.allowed is None:
            return
        for tensor in tensors_in((args, kwargs)):
            storage = storage_of(tensor)
            if id(tensor) in scope.ids or storage in scope.storages:
                scope.touched |= func not in ALIASES
                continue
            if self.recorder.knows(tensor, storage, before=scope.since):
                scope.hidden = True
