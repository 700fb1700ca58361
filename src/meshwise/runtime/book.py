"""The captures of one model: a cut graph for every structure of the batch, in train and in eval mode.

All ranks look the same structures up in the same order, so they always hold the same graphs and cuts.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..job import Job
from ..layout import Layout
from ..model.capture import capture
from ..model.graph import Graph
from ..model.stages import Staged, build_stages, cut_keys
from ..model.units import Key
from ..tree import leaves
from .losses import call_forward, count_samples, loss_of


def forward_names(model: nn.Module) -> list[str] | None:
    """List the names that a model's forward takes, or None when it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def structure_of(data: Any, num_samples: int) -> Hashable:
    """Describe a microbatch up to its number of samples: nesting, dtypes, other sizes, plain values."""
    found: list[Hashable] = [_shape_of_tree(data)]
    for leaf in leaves(data):
        if isinstance(leaf, Tensor):
            batched = leaf.ndim > 0 and leaf.shape[0] == num_samples
            found.append((leaf.dtype, batched, tuple(leaf.shape[1:] if batched else leaf.shape)))
        elif isinstance(leaf, (int, float, str, bool, type(None))):
            found.append(leaf)
        else:
            found.append(repr(type(leaf)))
    return tuple(found)


def _shape_of_tree(data: Any) -> Hashable:
    if isinstance(data, dict):
        return tuple((k, _shape_of_tree(v)) for k, v in data.items())
    if isinstance(data, (list, tuple)):
        return (type(data), tuple(_shape_of_tree(v) for v in data))
    return None


class Book:
    """Capture on demand and remember. ``cuts`` are fixed by the first capture in training mode."""

    def __init__(self, job: Job, layout: Layout, model: nn.Module, device: torch.device) -> None:
        self.job, self.layout, self.model, self.device = job, layout, model, device
        self.forward = call_forward(job, forward_names(model))
        self.keys: tuple[Key, ...] | None = None
        self.pages: dict[Hashable, Staged] = {}
        self.graphs: dict[Hashable, Graph] = {}
        self.programs: dict[Any, Any] = {}

    @staticmethod
    def inputs(data: Any) -> list[Any]:
        """List the leaves of a microbatch, as the graphs number them."""
        return leaves(data)

    def staged(self, data: Any, *, coupled: bool) -> tuple[Hashable, Staged]:
        """Give the cut graph for a microbatch, capturing it when its structure is new.

        ``coupled``: the step has several microbatches, so BatchNorm needs statistics over all of them.
        """
        num_samples = count_samples(data)
        training = self.model.training
        joint = coupled and training and self.job.batch_norm == "batch"
        key = (structure_of(data, num_samples), training, joint)
        found = self.pages.get(key)
        if found is None:
            found = self.pages[key] = self._capture(key[:2], data, num_samples, joint)
        return key, found

    def _capture(self, key: Hashable, data: Any, num_samples: int, joint: bool) -> Staged:
        if key not in self.graphs:
            use = loss_of(self.job) if self.model.training and self.job.loss_kind != "batch" else None
            self.graphs[key] = capture(self.model, self.forward, data, num_samples=num_samples, use=use)
        statistics = "microbatch" if self.job.batch_norm == "microbatch" and self.model.training else "batch"
        staged = build_stages(
            self.graphs[key],
            self.layout.num_stages,
            named=self.job.cuts,
            keys=self.keys,
            coupled=joint,
            statistics=statistics,
        )
        if self.keys is None:
            self.keys = cut_keys(staged)
        return staged
