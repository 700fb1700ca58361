"""A model without its memory: parameters and buffers as fake tensors, for models and devices that are not here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..tree import map_leaves


def fake_mode() -> FakeTensorMode:
    """Make a mode in which tensors have sizes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(value: Any, mode: FakeTensorMode) -> Any:
    """Replace the tensors inside nested data by fake ones on the host (those of the meta device too)."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.device.type == "meta":
            with mode:
                return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
        return mode.from_tensor(leaf)

    return map_leaves(change, value)


@contextlib.contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[nn.Module]:
    """Give the model fake parameters and buffers while this is open; shared ones stay shared."""
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    made: dict[int, Any] = {}

    def stand_in(tensor: Any) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in made:
            fake = as_fake(tensor.detach(), mode)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fake
        return made[id(tensor)]

    try:
        for module, parameters, buffers in held:
            module._parameters.update({k: stand_in(p) for k, p in parameters.items()})
            module._buffers.update({k: stand_in(b) for k, b in buffers.items()})
        yield model
    finally:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
