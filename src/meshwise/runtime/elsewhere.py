"""Count a job's model for hardware that is not here: built on the meta device, with one sample of its data."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..cost.profile import Profile
from ..cost.scaling import at_microbatch
from ..data.loader import MicrobatchLoader
from ..errors import DataError, JobError
from ..job import Job
from ..tree import map_leaves
from .build import build_model, lazy_names, seed_everything, settle_lazy
from .counted import count_sizes
from .shallow import count_shallow


def profiles_elsewhere(job: Job, sizes: Sequence[int]) -> list[Profile]:
    """Count the model at each microbatch size; beyond two sizes, what is affine in the samples is not counted again."""
    with collection_paused():
        return _profiles(job, sizes)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Leave garbage alone for a while: looking through millions of new objects again and again costs a third."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _profiles(job: Job, sizes: Sequence[int]) -> list[Profile]:
    model = build_on_meta(job)
    batches = [samples(job, size) for size in (sizes if len(sizes) <= 2 else (1, 2))]
    counted = count_shallow(job, model, batches) or count_sizes(job, model, batches)
    if len(sizes) <= 2:
        return counted
    one, two = counted
    return [one if s == 1 else two if s == 2 else at_microbatch(one, two, s) for s in sizes]


def build_on_meta(job: Job) -> nn.Module:
    """Build the job's model without memory; one whose building needs values is built as it is."""
    if isinstance(job.model, nn.Module):
        model = job.model
        if lazy_names(model):
            model = copy.deepcopy(model)
            settle_lazy(job, model, lambda: samples(job, 1))
        return model
    seed_everything(job.seed)
    try:
        with torch.device("meta"):
            model = job.model()
            if isinstance(model, nn.Module):
                settle_lazy(job, model, lambda: on_meta(samples(job, 1)))
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return build_model(job, torch.device("cpu"), lambda: samples(job, 1))
    if not isinstance(model, nn.Module):
        raise JobError(f"model= must be an nn.Module or a function that builds one, not {type(model).__name__}.")
    return model


def samples(job: Job, count: int) -> Any:
    """Give a microbatch of so many samples of the training data; data that is too short is repeated."""
    loader = MicrobatchLoader(job.train_data, seed=job.seed, num_workers=None)
    if loader.num_samples is None:
        found = next(loader.iterate(0, count), None)
        if not found:
            raise DataError("train_data gave no sample.")
        return loader.collate(0, range(len(found)), found)
    if loader.num_samples == 0:
        raise DataError("train_data holds no samples.")
    return loader.fetch(0, [k % loader.num_samples for k in range(count)])


def on_meta(data: Any) -> Any:
    """Give nested data without its values."""
    return map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, data)
