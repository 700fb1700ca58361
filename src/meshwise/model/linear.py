"""A linear layer whose backward writes the weight's gradient straight where it belongs.

Autograd's own would make a new tensor that must be copied to shared memory afterwards: for a large weight a copy costs
up to a tenth of the layer. The products are those of ``torch.nn.functional.linear``, so the bits are too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE = 1 << 17  # elements of a weight from which a copy costs more than a Python function in the backward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, places: list[Tensor | None] | None, k: int) -> Tensor:
    """Give ``F.linear(x, weight, bias)``; the weight's gradient goes to ``places[k]`` if that is set in the backward.

    ``weight`` must be used nowhere else: a second gradient would overwrite the first.
    """
    if places is None or weight.numel() < LARGE or not _is_plain(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, places, k)  # type: ignore[no-any-return, no-untyped-call]


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Tell whether torch multiplies two matrices as here: nothing cast, several leading dims seen as one."""
    return (
        (x.ndim == 2 or (x.ndim == 3 and x.is_contiguous()))
        and x.dtype == weight.dtype
        and weight.requires_grad
        and weight.is_contiguous()
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, places: list[Tensor | None], k: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places, ctx.k = places, k
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = rows.mm(weight).view(x.shape) if for_x else None
        grad_weight = None
        if for_weight:
            place = ctx.places[ctx.k]
            inputs = x.reshape(-1, x.shape[-1])
            if place is None:
                grad_weight = rows.t().mm(inputs)
            else:  # a new view, or autograd would copy what somebody else holds too
                grad_weight = torch.mm(rows.t(), inputs, out=place.view(place.shape))
        return grad_x, grad_weight, rows.sum(0) if for_bias else None, None, None
