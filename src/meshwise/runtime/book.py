"""The captures of one model: a cut graph for every structure of the batch, in train and in eval mode.

All ranks look the same structures up in the same order, so they always hold the same graphs and cuts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..job import Job
from ..layout import Layout
from ..model.capture import capture, holds_for
from ..model.graph import Graph
from ..model.inputs import Inputs
from ..model.place import Placement
from ..model.stages import Staged, build_stages
from ..tree import children
from .losses import call_forward, count_samples, loss_of
from .settings import Settings


def forward_names(model: nn.Module) -> list[str] | None:
    """List the names that a model's forward takes, or None when it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def outline(data: Any) -> Hashable:
    """Describe the tensors of a microbatch and how they nest, as cheaply as can be; None where it holds more."""
    kind = type(data)
    if kind is Tensor:
        return data.dtype, data.shape
    if kind is list or kind is tuple:
        parts = tuple(map(outline, data))
    elif kind is dict:
        parts = tuple(map(outline, data.values()))
    else:
        return None
    return None if None in parts else (kind, *data, *parts) if kind is dict else (kind, *parts)


def structure_of(data: Any, num_samples: int) -> Hashable:
    """Describe a microbatch up to its number of samples: nesting, dtypes, other sizes, plain values."""
    if isinstance(data, Tensor):
        batched = data.ndim > 0 and data.shape[0] == num_samples
        return (data.dtype, batched, data.shape[1:] if batched else data.shape)
    if isinstance(data, (int, float, str, bool, type(None))):
        return data
    kids = children(data)
    if kids is None:
        return repr(type(data))
    return (type(data), tuple((step[1], structure_of(child, num_samples)) for step, child in kids))


class Book:
    """Capture on demand and remember. ``cuts`` are fixed by the first capture in training mode."""

    def __init__(
        self, job: Job, layout: Layout, model: nn.Module, device: torch.device, cuts: Sequence[int] | None = None
    ) -> None:
        self.cuts = cuts  # from a plan
        self.job, self.layout, self.model, self.device = job, layout, model, device
        self.names = forward_names(model)
        self.forward = call_forward(job, self.names)
        self.placed = Placement(pp=layout.pp)
        self.pages: dict[Hashable, Staged] = {}
        self.graphs: dict[Hashable, Graph] = {}
        self.programs: dict[Any, Any] = {}
        self.known: dict[Hashable, tuple[Hashable, Staged]] = {}  # by outline: every step looks here
        self.fits: dict[Hashable, bool] = {}  # whether the general graph holds for a number of samples
        self.opaque: set[str] = set()
        self.settings: Hashable = None
        self.watch = Settings(model, self.opaque)

    def refresh(self) -> None:
        """Look at the model's flags again: where the user changed one, other captures count from now on."""
        self.settings = self.watch.look()

    @staticmethod
    def inputs(data: Any) -> Inputs:
        """List the tensors of a microbatch, as the graphs number them."""
        return Inputs(data)

    def staged(self, data: Any, *, coupled: bool) -> tuple[Hashable, Staged]:
        """Give the cut graph for a microbatch, capturing it when its structure is new.

        ``coupled``: the step has several microbatches, so BatchNorm needs statistics over all of them.
        """
        if self.settings is None:
            self.refresh()
        seen = (outline(data), self.settings, self.model.training, coupled)
        found = self.known.get(seen)
        if found is None:
            found = self._look_up(data, coupled)
            if seen[0] is not None and seen[1] == self.settings:
                self.known[seen] = found
        return found

    def _look_up(self, data: Any, coupled: bool) -> tuple[Hashable, Staged]:
        num_samples = count_samples(data)
        training = self.model.training
        joint = coupled and training and self.job.batch_norm == "batch"
        of_graph = self._graph_key(structure_of(self._seen(data), num_samples), training, data, num_samples)
        key = (of_graph, joint)
        found = self.pages.get(key)
        if found is None:
            found = self.pages[key] = self._cut(self.graphs[of_graph], joint)
        return key, found

    def _graph_key(self, structure: Hashable, training: bool, data: Any, num_samples: int) -> Hashable:
        """Name the graph that holds for a microbatch: the general one, or one for its number of samples alone."""
        kind = (structure, self.settings, training)
        general = self._graph((*kind, None), data, num_samples)
        if (kind, num_samples) not in self.fits:
            with self.autocast():
                fits = holds_for(general, self.model, self.forward, data, num_samples=num_samples)
            self.fits[kind, num_samples] = fits
        if self.fits[kind, num_samples]:
            return (*kind, None)
        self._graph((*kind, num_samples), data, num_samples)
        return (*kind, num_samples)

    def _seen(self, data: Any) -> Any:
        """Leave out of a dict what the model's forward does not take and what is no tensor (names, captions)."""
        if not isinstance(data, dict) or self.names is None or self.job.forward is not None:
            return data
        return {k: v for k, v in data.items() if k in self.names or isinstance(v, Tensor)}

    def autocast(self) -> Any:
        """Give the context that computes in the job's precision, and remembers no cast weight."""
        if self.job.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()

    def _leave_out(self, graph: Graph) -> None:
        """Leave opaque modules out of what is watched from now on: they may well count their own calls."""
        more = set(graph.opaque) | ({""} if graph.blocked else set())
        if more - self.opaque:
            self.opaque |= more
            self.watch = Settings(self.model, self.opaque)
            self.refresh()

    def _graph(self, key: tuple[Hashable, ...], data: Any, num_samples: int) -> Graph:
        """Give the graph of a key (structure, settings, mode, number of samples or None), captured when it is new."""
        if key not in self.graphs:
            use = loss_of(self.job) if self.model.training and self.job.loss_kind != "batch" else None
            exact = key[3] is not None
            with self.autocast():
                graph = capture(self.model, self.forward, data, num_samples=num_samples, use=use, exact=exact)
            self.graphs[key] = graph
            self._leave_out(graph)
            self.graphs[key[0], self.settings, key[2], key[3]] = graph
        return self.graphs[key]

    def _cut(self, graph: Graph, joint: bool) -> Staged:
        statistics = "microbatch" if self.job.batch_norm == "microbatch" and self.model.training else "batch"
        staged = build_stages(
            graph,
            self.layout.num_stages,
            named=self.job.cuts,
            chosen=self.cuts,
            placed=self.placed,
            coupled=joint,
            statistics=statistics,
        )
        self.placed.add(staged)
        return staged
