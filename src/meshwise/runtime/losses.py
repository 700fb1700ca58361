"""How the losses of parts make the loss of the whole: found out by evaluating, then used as weights.

With parts of n_i samples and v_i valid targets (not ``ignore_index``), the loss of the whole batch is one of

* ``sum``    sum_i L_i
* ``mean``   sum_i n_i L_i / sum n_i
* ``items``  sum_i v_i L_i / sum v_i
* ``batch``  none of these: the samples are coupled, so the loss is taken over the whole batch at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import JobError
from ..job import Job
from ..tree import leaves, map_leaves

Loss = Callable[[Any, Any], Tensor]


def call_forward(job: Job, signature: Sequence[str] | None) -> Callable[[Any, Any], Any]:
    """Give ``forward(model, batch)``: the job's own, ``model(*inputs)`` or ``model(**inputs)``.

    ``signature`` lists the names the model's forward takes (None: any).
    """
    if job.forward is not None:
        return job.forward

    def forward(model: Any, batch: Any) -> Any:
        if isinstance(batch, dict):
            return model(**{k: v for k, v in batch.items() if signature is None or k in signature})
        if isinstance(batch, (tuple, list)):
            inputs = batch[:-1] if job.loss is not None and len(batch) > 1 else batch
            return model(*inputs)
        return model(batch)

    return forward


def loss_of(job: Job) -> Loss:
    """Give ``loss(output, batch)`` for a microbatch, or the loss that the model returns itself."""
    if job.loss is None:
        return _own_loss
    given = job.loss

    def loss(output: Any, batch: Any) -> Tensor:
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return _scalar(given(output, batch[-1]))
        return _scalar(given(output, batch))

    return loss


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise JobError(f"the loss must be one number, but it is {shape}; take its mean() or sum().")
    return value if value.ndim == 0 else value.reshape(())


def _own_loss(output: Any, batch: Any) -> Tensor:
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(())
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None:
        raise JobError(
            "Job(loss=None) needs a model that returns its own loss (a scalar, or an output with .loss); "
            "give Job(loss=...) or pass the labels in the batch."
        )
    return _scalar(found)


# ---- weights -----------------------------------------------------------------------------------


def count_samples(batch: Any) -> int:
    """Count the samples of a batch: the first dim of its first tensor."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise JobError("the batch holds no tensor with a batch dimension, so its samples cannot be counted.")


def target_of(batch: Any) -> Any:
    """Give the part of a batch that holds the targets."""
    if isinstance(batch, dict):
        return batch.get("labels", batch.get("target", batch.get("targets")))
    return batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def count_items(batch: Any, ignore_index: int, shift: int) -> int:
    """Count the targets that are not ``ignore_index``, the first ``shift`` positions left out."""
    total = 0
    target = target_of(batch)
    for leaf in (target,) if type(target) is Tensor else leaves(target):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            part = leaf[:, shift:] if shift and leaf.ndim > 1 else leaf
            if part.device.type == "cpu":  # a third of the time
                total += int(numpy.count_nonzero(part.numpy() != ignore_index))
            else:
                total += int(torch.count_nonzero(part != ignore_index))
    return total


class Weigher:
    """Give the weight of a microbatch's loss: its samples, its valid items, or what the job says."""

    def __init__(self, job: Job, kind: str, shift: int = 0, per_sample: float = 1.0) -> None:
        self.job = job
        self.kind = kind
        self.shift = shift
        self.per_sample = per_sample  # what a sample usually measures; only keeps the numbers near 1
        self.ignore_index = int(getattr(job.loss, "ignore_index", -100))

    @property
    def needs_data(self) -> bool:
        """Tell whether weights must be counted in the data (and told to the other ranks)."""
        return self.job.weight is not None or self.kind == "items"

    def measure(self, batch: Any) -> float:
        """Measure one microbatch."""
        if self.job.weight is not None:
            return float(self.job.weight(batch))
        return float(count_items(batch, self.ignore_index, self.shift))


def find_kind(
    job: Job, parts: Callable[[list[int]], Any], evaluate: Loss, num_samples: int
) -> tuple[str, int, str]:
    """Find how losses add up, by evaluating the whole batch and its parts.

    ``parts(ids)`` gives ``(output, batch)`` of these samples of a probe batch. Gives the kind, the shift
    of the targets (1 for a causal language model) and a sentence that says how it is known.
    """
    if job.weight is not None:
        return "items", 0, "each microbatch weighs what weight= says"
    if job.loss_kind != "auto":
        return job.loss_kind, 0, f"loss_kind={job.loss_kind!r} was given"
    if num_samples < 2:
        return "mean", 0, "a single sample cannot tell; taken as a mean over samples"
    splits = [list(range(0, 1)), list(range(1, num_samples))]
    if num_samples > 3:
        splits = [list(range(0, 1)), list(range(1, 3)), list(range(3, num_samples))]
    whole_output, whole_batch = parts(list(range(num_samples)))
    pieces = [parts(ids) for ids in splits]
    with torch.no_grad():
        whole = float(evaluate(whole_output, whole_batch))
        losses = [float(evaluate(o, b)) for o, b in pieces]
    return _match(job, whole, losses, [b for _, b in pieces], [len(ids) for ids in splits], whole_output)


def _match(
    job: Job, whole: float, losses: list[float], batches: list[Any], counts: list[int], output: Any
) -> tuple[str, int, str]:
    ignore = int(getattr(job.loss, "ignore_index", -100))
    names = {
        type(leaf).__name__: leaf.dtype
        for leaf in leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    wide = all(d == torch.float64 for d in names.values()) and names
    tolerance = 1e-9 if wide else 1e-4

    def fits(weights: Sequence[float], scale: float) -> bool:
        total = sum(w * x for w, x in zip(weights, losses, strict=True)) / scale
        return abs(total - whole) <= tolerance * max(1e-3, abs(whole), *(abs(x) for x in losses))

    for shift in (0, 1):
        items = [count_items(b, ignore, shift) for b in batches]
        uneven = [i / n for i, n in zip(items, counts, strict=True)]
        if (
            min(items, default=0) > 0
            and fits(items, sum(items))
            and (max(uneven) > 1 or _class_target(batches))
        ):
            return "items", shift, "a mean over valid targets (evaluated on a batch and on its parts)"
    if fits(counts, sum(counts)):
        return "mean", 0, "a mean over samples (evaluated on a batch and on its parts)"
    if fits([1.0] * len(losses), 1.0):
        return "sum", 0, "a sum over samples (evaluated on a batch and on its parts)"
    return (
        "batch",
        0,
        "coupled over the batch (its parts do not add up), so it is taken over the whole batch at once",
    )


def _class_target(batches: list[Any]) -> bool:
    found = [x for b in batches for x in leaves(target_of(b)) if isinstance(x, Tensor)]
    return bool(found) and all(not t.is_floating_point() for t in found)


def perturbed(output: Any, seed: int) -> Any:
    """Add noise to the floating tensors of a probe's output, so that no special value hides a coupling."""
    generator = torch.Generator().manual_seed(seed)

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf)
            return leaf.detach() + noise * (0.1 + leaf.detach().abs().mean())
        return leaf

    return map_leaves(change, output)
