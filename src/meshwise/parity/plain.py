"""The user's own loop: one device, the whole batch at once, nothing of meshwise in between."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import VerifyError
from ..runtime.losses import loss_of
from ..runtime.update import build_optimizer

if TYPE_CHECKING:
    from ..session import Session

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
DROPOUTS_IN_PLACE = ("dropout_", "alpha_dropout_", "feature_dropout", "feature_dropout_")

# where a call takes its dropout rate (recurrent calls: without and with packed sequences)
POSITIONS = {
    "multi_head_attention_forward": (10,),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (5, 6)),
}


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
        if name in POSITIONS:
            args = tuple(0.0 if i in POSITIONS[name] and type(a) is float else a for i, a in enumerate(args))
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


@dataclass(kw_only=True)
class PlainStep:
    """Hold what a plain loop gave in one step: loss, gradients (as the optimizer got them) and buffers."""

    loss: float
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def plain_steps(session: Session, num_steps: int) -> list[PlainStep]:
    """Train a fresh copy of the session's model by a plain loop on its first batches."""
    worker = session.worker
    model = copy.deepcopy(worker.model)
    optimizer = build_optimizer(worker.job, model)
    scheduler = worker.job.scheduler(optimizer) if worker.job.scheduler is not None else None
    loss, limit = loss_of(worker.job), worker.job.clip_grad_norm
    steps = []
    for batch in itertools.islice(worker.batches(0), num_steps):
        data = worker._move(worker.loader.fetch(batch.epoch, batch.ids))
        optimizer.zero_grad()
        value = loss(worker.book.forward(model, data), data)
        torch.autograd.backward(value)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit, worker.job.clip_norm_type)
        steps.append(PlainStep(loss=float(value.detach()), grads=_grads(model), buffers=_buffers(model)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return steps


def _grads(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.to_dense() if g.is_sparse else g).detach().clone() for n, g in found.items()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: b.detach().clone() for n, b in model.named_buffers() if b.is_floating_point()}


def compare_plain(session: Session, num_steps: int) -> tuple[float, str]:
    """Compare this one-device session with the plain loop: the largest difference, and where it is.

    Losses and buffers are measured against 1 or their own size, gradients against the largest gradient of the
    step: weights would not do, since an optimizer like Adam blows the rounding of a zero gradient up.
    Raises VerifyError for a model that draws random numbers other than dropout: two runs would never agree.
    """
    drawing = [n.module for n in session.worker.staged.graph.nodes if n.random and not n.opaque]
    if drawing:
        raise VerifyError(f'"{drawing[0] or "the model"}" draws random numbers, which a plain loop draws otherwise')
    found = [(0.0, "")]
    expected = plain_steps(session, num_steps)
    for number, batch in enumerate(itertools.islice(session.batches(), num_steps)):
        plain, result = expected[number], session.step(batch)
        found.append((abs(result.loss - plain.loss) / max(1.0, abs(plain.loss)), f"the loss of step {number}"))
        found += _compare(_grads(session.model), plain.grads, _largest(plain.grads), f"step {number}: gradient")
        found += _compare(_buffers(session.model), plain.buffers, 1.0, f"step {number}: buffer")
    return max(found, key=lambda row: math.inf if math.isnan(row[0]) else row[0])


def _largest(grads: dict[str, Tensor]) -> float:
    return max((float(g.abs().max()) for g in grads.values() if g.numel()), default=1.0) or 1.0


def _compare(mine: dict[str, Tensor], other: dict[str, Tensor], scale: float, what: str) -> list[tuple[float, str]]:
    rows = []
    for name, value in mine.items():
        if value.numel() and name in other:
            size = max(scale, float(other[name].abs().max())) if "buffer" in what else scale
            rows.append((float((value - other[name]).abs().max()) / size, f'{what} "{name}"'))
    return rows
