"""Look at a job's first samples before step 1: how its loss adds up."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import JobError
from ..job import Job
from ..model.capture import resize_batch
from ..model.keep import kept_state
from ..tree import leaves, map_leaves
from .losses import Weigher, count_items, count_samples, find_kind, loss_of, perturbed

PROBE_SAMPLES = 6


def make_weigher(job: Job, model: nn.Module, forward: Any, data: Any) -> tuple[Weigher, str]:
    """Find how the loss of the job adds up, on a few samples, without changing the model or random states.

    Gives the weigher and a sentence that says what was found. Every rank does it on the same samples.
    """
    if isinstance(job.loss, nn.Module) and any(p.requires_grad for p in job.loss.parameters()):
        raise JobError(
            "the loss has parameters to train; make it a submodule of the model, so that they are trained."
        )
    num_samples = count_samples(data)
    few = resize_batch(data, num_samples, min(PROBE_SAMPLES, max(num_samples, 1)))
    count = count_samples(few)
    kind, shift, why = _find(job, model, forward, few, count)
    weigher = Weigher(job, kind, shift)
    if weigher.needs_data:
        full = job.weight(few) if job.weight is not None else _full_items(few, shift)
        weigher.per_sample = max(float(full), 1.0) / count
    return weigher, f"the loss is {why}"


def _full_items(batch: Any, shift: int) -> int:
    return count_items(batch, ignore_index=-(1 << 40), shift=shift)


def _find(job: Job, model: nn.Module, forward: Any, few: Any, count: int) -> tuple[str, int, str]:
    if job.weight is not None or job.loss_kind != "auto" or count < 2:
        return find_kind(job, lambda ids: (None, None), loss_of(job), count)
    with kept_state(model):
        model.eval()
        if job.loss is None:
            return _find_own(job, model, forward, few, count)
        output = perturbed(forward(model, few), seed=0)  # with gradients on: a forward may take one
        try:
            found = _kind_on(job, output, few, count)
            return (
                _HIDDEN
                if found[0] in ("mean", "items") and _hides(job, output, few, count, found[0])
                else found
            )
        except (RuntimeError, IndexError, ValueError):
            return _find_own(job, model, forward, few, count)


_HIDDEN = (
    "batch",
    0,
    "a mean whose weights lie in the batch (a mask, or weights of classes), so it is taken over the whole "
    "batch at once; Job(weight=...) lets each microbatch have its own",
)


def _kind_on(job: Job, output: Any, batch: Any, count: int) -> tuple[str, int, str]:
    return find_kind(
        job, lambda ids: (_rows(output, count, ids), _rows(batch, count, ids)), loss_of(job), count
    )


def _hides(job: Job, output: Any, batch: Any, count: int, kind: str) -> bool:
    """Tell whether the loss would add up in another way if these few samples had other masks or classes."""
    classes = [min(t.shape[1:]) for t in leaves(output) if isinstance(t, Tensor) and t.ndim > 1]
    for change in (_thin_mask, _redraw_classes):
        other = map_leaves(partial(change, count, classes), batch)
        try:
            if _kind_on(job, output, other, count)[0] != kind:
                return True
        except (RuntimeError, IndexError, ValueError):
            continue  # the loss does not take such values, so it will not meet them
    return False


def _thin_mask(count: int, classes: list[int], leaf: Any) -> Any:
    """Set about half of a 0/1 tensor's entries to 0, never the first of a sample's."""
    if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != count or leaf.is_complex():
        return leaf
    if not bool(((leaf == 0) | (leaf == 1)).all()):
        return leaf
    kept = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    if leaf.ndim > 1:
        kept[..., 0] = True
    return torch.where(kept.to(leaf.device), leaf, torch.zeros_like(leaf))


def _redraw_classes(count: int, classes: list[int], leaf: Any) -> Any:
    """Draw integer targets anew among the classes that the output surely has."""
    if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64 or not leaf.ndim or leaf.shape[0] != count:
        return leaf
    drawn = torch.randint(
        classes[0] if classes else 1, leaf.shape, generator=torch.Generator().manual_seed(2)
    )
    return torch.where(leaf < 0, leaf, drawn.to(leaf.device))


def _find_own(job: Job, model: nn.Module, forward: Any, few: Any, count: int) -> tuple[str, int, str]:
    def parts(ids: list[int]) -> tuple[Any, Any]:
        rows = _rows(few, count, ids)
        return forward(model, rows), rows

    return find_kind(job, parts, loss_of(job), count)


def _rows(value: Any, count: int, ids: list[int]) -> Any:
    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == count:
            return leaf[ids]
        return leaf

    return map_leaves(take, value)
