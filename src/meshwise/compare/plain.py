"""The user's own loop: one device, the whole batch at once, nothing of meshwise in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..runtime.losses import loss_of
from ..runtime.update import build_optimizer

if TYPE_CHECKING:
    from ..session import Session

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
DROPOUTS_IN_PLACE = ("dropout_", "alpha_dropout_", "feature_dropout", "feature_dropout_")


class NoDropout(TorchFunctionMode):
    """Leave dropout out wherever it is called, so that two runs that draw differently can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one torch call, a dropout as the identity."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS or name in DROPOUTS_IN_PLACE:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], *([0.0] if len(args) > 4 else []), *args[5:]), {**kwargs, "dropout_p": 0.0}
            if len(args) > 4:
                kwargs.pop("dropout_p")
        if name == "multi_head_attention_forward" and len(args) > 11:
            args = (*args[:11], 0.0, *args[12:])
        return func(*args, **kwargs)


def plain_losses(session: Session, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train a fresh copy of the session's model by a plain loop on its first batches; losses and weights."""
    import copy

    worker = session.worker
    model = copy.deepcopy(worker.model)
    optimizer = build_optimizer(worker.job, model)
    scheduler = worker.job.scheduler(optimizer) if worker.job.scheduler is not None else None
    loss = loss_of(worker.job)
    losses = []
    for number, batch in enumerate(worker.batches(0)):
        if number >= num_steps:
            break
        data = worker._move(worker.loader.fetch(batch.epoch, batch.ids))
        optimizer.zero_grad()
        value = loss(worker.book.forward(model, data), data)
        torch.autograd.backward(value)
        if worker.job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), worker.job.clip_grad_norm, worker.job.clip_norm_type
            )
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(value.detach()))
    return losses, dict(model.state_dict())


def compare_plain(session: Session, num_steps: int) -> tuple[float, str]:
    """Compare this one-device session with the plain loop: the largest difference, relative to 1 or larger."""
    losses, weights = plain_losses(session, num_steps)
    worst, name = 0.0, ""
    for number, batch in enumerate(session.batches()):
        if number >= num_steps:
            break
        result = session.step(batch)
        difference = abs(result.loss - losses[number]) / max(1.0, abs(losses[number]))
        if not difference <= worst:
            worst, name = difference, f"the loss of step {number}"
    for key, value in session.model.state_dict().items():
        if not value.is_floating_point():
            continue
        scale = max(1.0, float(weights[key].abs().max()) if value.numel() else 1.0)
        difference = float((value - weights[key]).abs().max()) / scale if value.numel() else 0.0
        if not difference <= worst:
            worst, name = difference, f'"{key}" after step {num_steps - 1}'
    return worst, name
