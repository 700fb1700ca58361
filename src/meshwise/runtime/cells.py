"""Run the cells of one stage: forward, backward, or the backward split in its two halves.

A stage's boundary cuts autograd: what it takes are leaves, what it gives waits for gradients from later.
Gradients of the leaves come raw from autograd (no copy into another layout), as in an uncut backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.codegen import Segment, Site
from ..model.graph import Attribute, Constant
from ..model.stages import Staged
from ..tree import leaves as tree_leaves

Values = tuple[Tensor | None, ...]


@dataclass(kw_only=True)
class Cell:
    """Hold what one cell keeps between its forward and its backward."""

    takes: Values
    gives: Values = ()
    loss: Tensor | None = None
    leaves: tuple[Tensor, ...] = ()
    rows: Any = None
    buffers: tuple[Tensor, ...] = ()
    whole: Any = None


def split_prefix(name: str) -> tuple[str, str]:
    """Part a dotted name in its module's path and its own name."""
    path, _, last = name.rpartition(".")
    return path, last


class StageState:
    """Look up a stage's parameters and buffers afresh at each step, and run its segments.

    ``seed(unit)`` is called by the generated code before a unit that draws random numbers.
    """

    def __init__(self, model: nn.Module, staged: Staged, stage: int) -> None:
        self.model = model
        self.staged = staged
        self.stage = stage
        self.segments = staged.stages[stage]
        self.sites = staged.sites(stage)
        self.tensors: dict[Site, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.candidates: dict[str, Tensor] = {}
        self.carried: dict[tuple[int, int, str], Tensor] = {}  # what (microbatch, segment) left in a buffer
        self.statistics: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.modules = dict(model.named_modules())
        held = [(site, *split_prefix(site[0])) for site in self.sites]
        self.holders = [(site, self.modules[path]._parameters, last) for site, path, last in held]
        self.constants = staged.graph.constants
        self.places: list[list[Tensor | None] | None] = [None] * len(self.segments)  # see Gradients.aim

    def attribute(self, ref: Attribute | Constant) -> Tensor:
        """Give a tensor that the model holds outside parameters and buffers."""
        if isinstance(ref, Constant):
            constant: Tensor = self.constants[ref.index]
            return constant
        tensor: Tensor = getattr(self.modules[ref.module], ref.name)
        return tensor

    def begin(self, tensors: dict[Site, Tensor]) -> None:
        """Look up parameters and buffers for one step; ``tensors`` (site -> leaf) is shared by a rank's stages."""
        self.candidates, self.statistics, self.carried = {}, {}, {}
        self.tensors = tensors
        taken = {name for name, group in tensors if group >= 0}
        for site, parameters, last in self.holders:
            if site in tensors:
                continue
            parameter = parameters[last]
            assert parameter is not None
            row = site[1] < 0  # what a coupled row's site collects is wanted even when it is frozen
            tensors[site] = _alias(parameter, always=row) if row or site[0] in taken else parameter
            taken |= set() if row else {site[0]}
        self._neutral_rows()
        for segment in self.segments:
            for name in segment.buffers:
                path, last = split_prefix(name)
                self.buffers[name] = self.modules[path]._buffers[last]

    def _neutral_rows(self) -> None:
        """Make the 1s and 0s that stand in where a BatchNorm has no weight and bias."""
        for segment in self.segments:
            for site, value in zip(segment.row_sites or (), (1.0, 0.0), strict=False):
                if not site[0]:
                    row = segment.row
                    assert row is not None
                    like = torch.empty(0, dtype=row.dtype)
                    self.tensors[site] = like.new_full((row.channels,), value, requires_grad=True)

    def buffer_of(self, name: str) -> Tensor:
        """Give a buffer's value at the start of the step."""
        path, last = split_prefix(name)
        buffer: Tensor | None = self.modules[path]._buffers[last]
        assert buffer is not None
        return buffer

    # ---- forward -----------------------------------------------------------------------------------

    def forward(
        self,
        k: int,
        inputs: Sequence[Any],
        takes: Values,
        *,
        batch: int,
        seed: Any,
        rows: Any,
        key: tuple[int, int],
    ) -> Cell:
        """Run segment ``k`` on one microbatch; ``key`` orders what it leaves in buffers."""
        segment = self.segments[k]
        leaves = tuple(self.tensors[s] for s in segment.sites)
        buffers = tuple(self._buffer_for(b, key, b in segment.changes) for b in segment.buffers)
        with self._private_buffers(segment) if segment.opaque else contextlib.nullcontext():
            out, extra = segment.run(inputs, takes, leaves, buffers, rows, batch, seed, self.attribute, self.places[k])
        for name, buffer in zip(segment.buffers, buffers, strict=True):
            if name in segment.changes and (*key, name) not in self.carried:  # not when it runs again
                self.candidates[name] = self.carried[(*key, name)] = buffer
        for name, value in zip(segment.rebinds, extra, strict=False):
            self.candidates[name] = value.detach()
        for n, pair in enumerate(extra[len(segment.rebinds) :]):
            self.statistics[key[0], k, n] = pair
        if self.staged.graph.blocked:
            gives = tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            return Cell(takes=takes, gives=gives, whole=out, leaves=leaves, rows=rows)
        return Cell(takes=takes, gives=out, leaves=leaves, rows=rows)

    def _buffer_for(self, name: str, key: tuple[int, int], changes: bool) -> Tensor:
        """Give a cell a buffer as the microbatch's segments before left it, its own copy where it changes it."""
        m, k = key
        before = (self.carried[m, j, name] for j in reversed(range(k)) if (m, j, name) in self.carried)
        found = next(before, self.buffers[name])
        return found.clone() if changes else found

    @contextlib.contextmanager
    def _private_buffers(self, segment: Segment) -> Any:
        """Give opaque modules copies of their buffers, so that each microbatch starts from the step's values."""
        names = [b for path in segment.opaque for b in self.staged.graph.module_buffers.get(path, ())]
        if not names:
            yield
            return
        held = {}
        for name in names:
            path, last = split_prefix(name)
            held[name] = self.modules[path]._buffers[last]
            self.modules[path]._buffers[last] = held[name].clone() if held[name] is not None else None
        try:
            yield
        finally:
            for name, old in held.items():
                path, last = split_prefix(name)
                new = self.modules[path]._buffers[last]
                self.modules[path]._buffers[last] = old
                if new is not None and not (new is old or torch.equal(new, old)):
                    self.candidates[name] = new.detach()

    # ---- backward ----------------------------------------------------------------------------------

    def backward(self, cell: Cell, grads: Values) -> tuple[Values, list[Tensor | None]]:
        """Run a cell's backward: gradients of what it took, and of its leaves (parameters).

        Without boundary inputs the leaves' ``.grad`` accumulate as in a plain loop and the list is empty.
        """
        outs, out_grads = roots(cell, grads)
        wanted = [t for t in cell.takes if t is not None and t.requires_grad]
        if not wanted:
            if outs:
                torch.autograd.backward(outs, out_grads)
            return tuple(None for _ in cell.takes), []
        leaves = [t for t in cell.leaves if t.requires_grad]
        if not outs:
            return tuple(None for _ in cell.takes), [None] * len(cell.leaves)
        found = torch.autograd.grad(outs, [*wanted, *leaves], out_grads, allow_unused=True)
        return _spread(cell.takes, found[: len(wanted)]), _spread_list(cell.leaves, found[len(wanted) :])

    def backward_input(self, cell: Cell, grads: Values) -> Values:
        """Run the half of a backward that earlier stages wait for; the other half stays for later."""
        from .split import split_backward

        outs, out_grads = roots(cell, grads)
        wanted = [t for t in cell.takes if t is not None and t.requires_grad]
        leaves = [t for t in cell.leaves if t.requires_grad]
        if not outs or not wanted:
            cell.whole = ("all", grads)
            return tuple(None for _ in cell.takes)
        found, finish = split_backward(outs, out_grads, wanted, leaves)
        cell.whole = ("half", finish)
        return _spread(cell.takes, found)

    def backward_weight(self, cell: Cell) -> list[Tensor | None]:
        """Run the other half: gradients of the leaves."""
        kind, rest = cell.whole
        if kind == "all":
            return self.backward(cell, rest)[1]
        return _spread_list(cell.leaves, rest())


def roots(cell: Cell, grads: Values) -> tuple[list[Tensor], list[Tensor | None]]:
    """List where a cell's backward starts: its loss, and what it gave that has a gradient."""
    outs: list[Tensor] = []
    out_grads: list[Tensor | None] = []
    if cell.loss is not None and cell.loss.requires_grad:
        outs.append(cell.loss)
        out_grads.append(None)
    for value, grad in zip(cell.gives, grads, strict=False):
        if value is not None and grad is not None and value.requires_grad:
            outs.append(_Handed.apply(value, grad))  # type: ignore[no-untyped-call]
            out_grads.append(None)
    return outs, out_grads


class _Handed(torch.autograd.Function):
    """Make a scalar whose gradient is 1 where a value's is the one that was handed over.

    Given to autograd as an argument, a gradient's shape is compared symbolically, for which torch imports its symbolic
    shapes: a third of a second, and 31 MiB in every rank.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def _spread(takes: Values, found: Sequence[Tensor | None]) -> Values:
    source = iter(found)
    return tuple(next(source) if t is not None and t.requires_grad else None for t in takes)


def _spread_list(leaves: Sequence[Tensor], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    source = iter(found)
    return [next(source) if t.requires_grad else None for t in leaves]


def _alias(parameter: nn.Parameter, *, always: bool) -> Tensor:
    return parameter.detach().requires_grad_(always or parameter.requires_grad)
