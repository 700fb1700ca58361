"""Sending objects to the ranks: pickling that also takes what torch and pickle refuse or lose."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from cloudpickle.cloudpickle import _code_reduce  # type: ignore[import-untyped]
from torch import nn
from torch.nn.utils import parametrize

from meshwise.errors import LaunchError
from meshwise.launch.byvalue import local_modules_by_value

Reduced = tuple[Any, ...]
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)


def dumps(value: Any, *, what: str = "") -> bytes:
    """Pickle a value so that a fresh process can rebuild it with ``loads``.

    Classes and functions of ``__main__`` and of modules that a fresh process could not import travel
    whole. ``what`` names the value in the message. Raises LaunchError naming the attribute that cannot be
    sent.
    """
    buffer = io.BytesIO()
    try:
        dump(value, buffer)
    except Exception as error:
        from meshwise.launch.culprit import explain  # only needed here, and it needs this module

        raise LaunchError(explain(value, error, what)) from error
    return buffer.getvalue()


def dump(value: Any, file: Any) -> None:
    """Pickle a value to a binary file; raises whatever pickling raised."""
    with local_modules_by_value():
        _Pickler(file).dump(value)


def loads(data: Any) -> Any:
    """Rebuild a value from bytes or any buffer. Only ever use it on what this job's own processes wrote."""
    return pickle.loads(data)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Add to cloudpickle what a training job needs."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _FILES) and value is not sys.stdout and value is not sys.stderr:
            raise TypeError(f"cannot pickle {type(value).__name__!r}: an open file belongs to one process")
        if isinstance(value, types.CodeType):
            return _reduce_code(value)
        if isinstance(value, torch.TypedStorage):
            return _reduce_typed_storage(value)
        if isinstance(value, torch.UntypedStorage):
            return _reduce_untyped_storage(value)
        if isinstance(value, torch.Tensor):
            return _reduce_tensor(value)
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            return _reduce_parametrized(value)
        return super().reducer_override(value)


def _reduce_code(code: types.CodeType) -> Reduced:
    """Keep the file's name, which cloudpickle drops: a traceback in a rank then shows the user's lines."""
    function, args = _code_reduce(code)
    names = {"<dynamic-code>": code.co_filename}
    return function, tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in args)


def _reduce_typed_storage(storage: torch.TypedStorage) -> Reduced:
    """Point to the one untyped storage, so that views of the same memory stay views of the same memory."""
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    make: Any = torch.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)


def _reduce_untyped_storage(storage: torch.UntypedStorage) -> Reduced:
    """Send the bytes; on another device than the CPU torch must do it."""
    if storage.device.type == "cpu":
        return _fresh_storage, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)
    return _inner_storage, (_typed_storage(storage, torch.uint8).__reduce__()[1][0],)


def _fresh_storage(data: Any) -> torch.UntypedStorage:
    """Copy the bytes into memory that torch has aligned: results may depend on the alignment."""
    return torch.from_numpy(data).clone().untyped_storage()


def _inner_storage(data: bytes) -> torch.UntypedStorage:
    load: Any = torch.storage._load_from_bytes
    storage: torch.UntypedStorage = load(data)._untyped_storage
    return storage


def _reduce_tensor(tensor: Any) -> Any:
    """Detach results of a computation (torch refuses them); take the hooks along (torch loses them)."""
    if tensor.grad_fn is not None:
        return tensor.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    hooks = tensor._backward_hooks
    accumulated = getattr(tensor, "_post_accumulate_grad_hooks", None)
    if not hooks and not accumulated:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    try:
        tensor._backward_hooks = None  # or torch warns that it loses them
        function, args = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    finally:
        tensor._backward_hooks = hooks
    state = (list((hooks or {}).values()), list((accumulated or {}).values()))
    return function, args, state, None, None, _register_hooks


def _register_hooks(tensor: Any, state: tuple[list[Callable[..., Any]], list[Callable[..., Any]]]) -> None:
    """Register the hooks again; a frozen parameter must seem trainable while that happens."""
    trainable = tensor.requires_grad
    tensor.requires_grad_(True)
    for hook in state[0]:
        tensor.register_hook(hook)
    for hook in state[1]:
        tensor.register_post_accumulate_grad_hook(hook)
    tensor.requires_grad_(trainable)


def _reduce_parametrized(module: nn.Module) -> Reduced:
    """Send the class the module had before: torch made the present one and refuses to pickle it."""
    original = parametrize.type_before_parametrizations(module)
    return _empty, (original,), module.__dict__, None, None, _parametrize_again


def _empty(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _parametrize_again(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)
