"""Build the job's model: the same weights on every rank, lazy layers from one microbatch of the data."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

from ..errors import DataError, JobError
from ..job import Job
from .book import forward_names
from .losses import call_forward


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def build_model(job: Job, device: torch.device, sample: Callable[[], Any] | None = None) -> nn.Module:
    """Build the job's model on a device, the same weights on every rank (a function is called under the seed).

    ``sample`` gives a microbatch that lazy layers take their sizes from. Raises JobError for what is no module, and for
    a lazy layer where there is no sample.
    """
    if isinstance(job.model, nn.Module):
        model = job.model
    else:
        seed_everything(job.seed)
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"model= must be an nn.Module or a function that builds one, not {type(model).__name__}.")
    model = model.to(device, torch.float64) if job.precision == "float64" else model.to(device)
    settle_lazy(job, model, sample)
    return model


def settle_lazy(job: Job, model: nn.Module, sample: Callable[[], Any] | None) -> None:
    """Let lazy layers take their sizes from a sample. Raises JobError that names one where there is none."""
    if not lazy_names(model):
        return
    with contextlib.suppress(DataError):
        if sample is not None:
            fill_lazy(job, model, sample())
    refuse_lazy(model)


def lazy_names(model: nn.Module) -> list[str]:
    """List the parameters and buffers whose sizes are not known yet."""
    kinds = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    return [n for n, t in [*model.named_parameters(), *model.named_buffers()] if isinstance(t, kinds)]


def fill_lazy(job: Job, model: nn.Module, data: Any) -> None:
    """Let lazy layers take their sizes, and their first weights under the job's seed, from one forward in eval mode."""
    seed_everything(job.seed)
    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            call_forward(job, forward_names(model))(model, data)
    finally:
        for module, was in training.items():
            module.training = was


def refuse_lazy(model: nn.Module) -> None:
    """Raise JobError for a layer whose size nobody knows."""
    lazy = lazy_names(model)
    if lazy:
        raise JobError(
            f"parameter {lazy[0]!r} is lazy: its size is not known yet, and a forward of one microbatch did not settle "
            "it. Run one sample through the model where it is built, before it goes into the Job."
        )
