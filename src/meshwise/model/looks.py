"""What can be seen of tensors, modules and surroundings during a trace."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from .graph import ValueInfo
from .watch import BOOLEANS, in_fake_mode, is_fake, storage_of, tensors_in

# Calls that tell how a tensor is laid out, nothing of its values.
METADATA = frozenset(
    "size dim numel nelement is_floating_point is_complex is_contiguous stride storage_offset element_size"
    " get_device ndimension type is_same_size __len__ __hash__ is_pinned is_shared"
    " is_signed is_conj is_neg is_inference has_names _is_view is_nested"
    " result_type can_cast promote_types broadcast_shapes is_set_to is_tensor"
    " _has_compatible_shallow_copy_type is_grad_enabled is_autocast_enabled".split()
)
SHAPE_READS = frozenset("size numel nelement __len__ shape stride is_contiguous".split())
SIDE_EFFECTS = frozenset("requires_grad_ retain_grad".split())

# Calls whose result has the shape of their first tensor, whatever the others are.
FIRST_SHAPE = frozenset(
    "masked_fill masked_scatter index_fill index_add index_copy index_put scatter scatter_add scatter_reduce"
    " index_reduce put".split()
)
# Calls that read values, but not to shape their result.
FIXED_SHAPE = frozenset("full full_like fill multinomial bernoulli histc ctc_loss embedding_bag".split())


def shape_of_first(name: str) -> bool:
    """Tell whether a call's result has the shape of its first argument."""
    return name in FIRST_SHAPE


def reads_for_shape(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether a call that reads values inside may do so to shape its result."""
    if name in FIXED_SHAPE:
        return False
    if name == "one_hot":
        return int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1)) < 0
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, slice) or t.dtype in BOOLEANS for i in index for t in tensors_in((i,)))
    return True


def decided(name: str, args: Any) -> bool:
    """Tell whether a number drawn from [0, 1) compares with a constant in one way for all draws."""
    if len(args) != 2 or isinstance(args[1], Tensor) or not isinstance(args[1], (int, float)):
        return False
    bound = float(args[1])
    if name in ("lt", "ge", "__lt__", "__ge__", "less", "greater_equal"):
        return bound <= 0 or bound >= 1
    if name in ("gt", "le", "__gt__", "__le__", "greater", "less_equal"):
        return bound < 0 or bound >= 1
    return False


def hooked(module: nn.Module) -> str:
    """Say which hooks of the user's make a module one that must run as it is, or return ''."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [kind.strip("_").replace("_", " ") for kind in kinds if getattr(module, kind, None)]
    return f"it has {found[0]}" if found else ""


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """List torch's default generators of the host and of the devices the model is on."""
    if in_fake_mode():
        return []
    found = [torch.default_generator]
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            found.append(torch.cuda.default_generators[index])
    return found


def foreign_random_state() -> tuple[Any, ...]:
    """Give the states of Python's and numpy's generators, to compare."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), tuple(state[2:])


def autocast_state(devices: Iterable[str]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Give whether autocast is on, and its dtype, for each device type."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(devices)
    )


def describe(tensor: Tensor, producer: int, num_samples: int, *, dynamic: bool) -> ValueInfo:
    """State what a traced tensor looked like."""
    storage = storage_of(tensor)
    strided = storage is not None and (type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor))
    return ValueInfo(
        producer=producer,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        storage=-1 if storage is None else storage,
        sendable=strided and not overlaps(tensor),
        dynamic=dynamic,
    )


def overlaps(tensor: Tensor) -> bool:
    """Tell whether different elements share memory, expanded (stride 0) dims aside."""
    dims = sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if st != 0 and sz > 1
    )
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
