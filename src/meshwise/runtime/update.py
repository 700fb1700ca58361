"""After the reduction: tied weights, the user's gradient hooks, the true norm, clipping, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import JobError
from ..job import Job

NORM_BLOCK = 1 << 16  # elements of a block of the gradient norm: fixed, so that shards can cut between blocks


def take_hooks(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, tuple[list[Any], list[Any]]]:
    """Take the user's gradient hooks off the parameters: they run once a step, on the whole gradient."""
    taken = {}
    for parameter in parameters:
        before = _hooks(parameter, "_backward_hooks")
        after = _hooks(parameter, "_post_accumulate_grad_hooks")
        if before or after:
            taken[parameter] = (list(before.values()), list(after.values()))
            before.clear()
            after.clear()
    return taken


def _hooks(parameter: nn.Parameter, name: str) -> dict[Any, Any]:
    found: dict[Any, Any] | None = getattr(parameter, name, None)
    return {} if found is None else found


def run_hooks(hooks: Mapping[nn.Parameter, tuple[list[Any], list[Any]]]) -> None:
    """Run the user's hooks on the gradients of the whole batch."""
    for parameter, (before, after) in hooks.items():
        if parameter.grad is None:
            continue
        for hook in before:
            changed = hook(parameter.grad)
            if changed is not None:
                parameter.grad = changed
        for hook in after:
            hook(parameter)


def block_norms(grads: Sequence[Tensor], kind: float) -> list[float]:
    """Give each gradient's norm, computed over fixed blocks in a fixed order (float64 between blocks)."""
    blocks, counts = cut_blocks(grads)
    return combine_blocks(norms_of(blocks, kind).tolist(), counts, kind) if blocks else []


def cut_blocks(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Cut gradients in blocks; give them all, and how many each gradient has."""
    blocks: list[Tensor] = []
    counts: list[int] = []
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        flat = torch.split(values.reshape(-1), NORM_BLOCK) if values.numel() else (values.reshape(-1),)
        blocks.extend(flat)
        counts.append(len(flat))
    return blocks, counts


def norms_of(blocks: list[Tensor], kind: float) -> Tensor:
    """Give the norm of each block, in float64."""
    return torch.stack([n.double() for n in torch._foreach_norm(blocks, kind)])


def combine_blocks(norms: Sequence[float], counts: Sequence[int], kind: float) -> list[float]:
    """Combine the norms of blocks to those of the gradients they were cut from."""
    result, at = [], 0
    for count in counts:
        result.append(combine_norms(norms[at : at + count], kind))
        at += count
    return result


def combine_norms(norms: Sequence[float], kind: float) -> float:
    """Combine norms of parts to the norm of the whole, in the order given."""
    if kind == math.inf:
        return max(norms, default=0.0)
    if len(norms) == 1:
        return norms[0]
    total = 0.0
    for norm in norms:
        total += norm**kind
    return float(total ** (1.0 / kind))


def clip_grads(grads: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients in place so that the norm is at most ``limit`` (as torch: limit / (norm + 1e-6))."""
    scale = limit / (norm + 1e-6)
    if scale < 1.0 or math.isnan(scale):
        torch._foreach_mul_(list(grads), scale)


def build_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Build the job's optimizer over all parameters, in the groups the job asks for.

    Every rank builds the same groups; parameters of other ranks are placeholders that never get a gradient.
    """
    named = list(model.named_parameters())
    params: Any = [p for _, p in named]
    if job.param_groups is not None:
        params = _group(job, named)
    optimizer = job.optimizer(params)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer= must return a torch optimizer, but it returned {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise JobError(
            "LBFGS evaluates the loss several times a step; use an optimizer whose step() needs no closure."
        )
    return optimizer


def _group(job: Job, named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    assert job.param_groups is not None
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        options = dict(job.param_groups(name, parameter))
        groups.setdefault(repr(sorted(options.items())), {"params": [], **options})["params"].append(
            parameter
        )
    return list(groups.values())
