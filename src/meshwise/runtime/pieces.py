"""The pieces of a row of parameters that one rank updates, and the optimizer working on them.

::

    row          | p0      |p1|      p2        |p3|
    rank 0       | piece 0          |                     the optimizer's own groups, their options and schedules,
    rank 1                          | piece 1     |       but its parameters are pieces of the row

Only for optimizers that treat each element by itself (see ``elementwise``); their state is that of whole
parameters, cut at the same places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.flats import in_memory_order, shaped
from ..parallel.rows import RowLayout

State = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class Piece:
    """Hold bytes ``start .. stop-1`` of the row as one parameter of the optimizer's group ``group``."""

    start: int
    stop: int
    group: int
    first: int  # index of the (first) parameter that it holds
    parameter: nn.Parameter


@dataclass(frozen=True, kw_only=True)
class Part:
    """Name elements ``low .. high-1`` (in memory order) of a parameter: what a piece holds of it."""

    index: int  # of the parameter in the row
    low: int
    high: int
    start: int  # byte of the row at which the part begins
    stop: int  # byte at which the next part may begin


@dataclass(kw_only=True)
class Pieces:
    """Cut ``share`` (bytes of the row) in pieces, and give them to the optimizer in the parameters' place.

    ``groups[k]`` is the optimizer's group of the k-th parameter in the row (-1: of none, it is left out).
    """

    row: Tensor
    layout: RowLayout
    parameters: Sequence[Tensor]
    groups: Sequence[int]
    share: tuple[int, int]
    optimizer: torch.optim.Optimizer
    pieces: list[Piece] = field(default_factory=list)
    whole: list[list[Tensor]] = field(default_factory=list)  # the optimizer's parameters as it had them, by group
    others: list[list[Tensor]] = field(default_factory=list)  # those of them that are not in the row

    def install(self) -> None:
        """Replace the optimizer's parameters by pieces, and its state by that of the pieces."""
        mine = {id(p) for p in self.parameters}
        self.whole = [list(group["params"]) for group in self.optimizer.param_groups]
        self.others = [[p for p in group if id(p) not in mine] for group in self.whole]
        states = {k: self.optimizer.state.pop(p) for k, p in enumerate(self.parameters) if p in self.optimizer.state}
        self.load(states)

    def load(self, states: Mapping[int, State]) -> None:
        """Begin anew from the states of whole parameters, by index in the row."""
        for piece in self.pieces:
            self.optimizer.state.pop(piece.parameter, None)
        self.pieces = []
        kinds = [self._kind(k, states.get(k)) for k in range(len(self.parameters))]
        for _, run in itertools.groupby(self._parts(*self.share), key=lambda part: kinds[part.index]):
            parts = list(run)
            if self.groups[parts[0].index] >= 0:
                self._add(parts, [states.get(part.index) for part in parts])
        self._hand_over()

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        """List what of each parameter lies between two bytes of the row; padding goes with what is before it."""
        ends = (*self.layout.offsets[1:], self.layout.num_bytes)
        for k, (begin, end, parameter) in enumerate(zip(self.layout.offsets, ends, self.parameters, strict=True)):
            low, high = max(start, begin), min(stop, end)
            size, count = parameter.element_size(), parameter.numel()
            if low < high and (low - begin) // size < count:
                first, last = (low - begin) // size, min(count, (high - begin) // size)
                yield Part(index=k, low=first, high=last, start=low, stop=high)

    def _kind(self, index: int, state: State | None) -> tuple[Any, ...]:
        """Say what parts must share to be one piece."""
        parameter = self.parameters[index]
        alone = index if parameter.ndim == 0 else -1  # its state could not be told from a plain number
        plain = {k: v for k, v in (state or {}).items() if not _is_elementwise(v, parameter)}
        facts = tuple((k, v.item() if isinstance(v, Tensor) and v.numel() == 1 else repr(v)) for k, v in plain.items())
        return self.groups[index], parameter.dtype, alone, None if state is None else tuple(state), facts

    def _add(self, parts: Sequence[Part], states: Sequence[State | None]) -> None:
        start, stop = parts[0].start, parts[-1].stop
        first = self.parameters[parts[0].index]
        flat = self.row[start:stop].view(first.dtype)
        if first.ndim == 0:
            flat = flat[0]
        index = parts[0].index
        piece = Piece(start=start, stop=stop, group=self.groups[index], first=index, parameter=nn.Parameter(flat))
        if states[0] is not None:
            self.optimizer.state[piece.parameter] = self._join(parts, states, flat)
        self.pieces.append(piece)

    def _join(self, parts: Sequence[Part], states: Sequence[State | None], flat: Tensor) -> State:
        """Put the states of parts one behind another as they lie in the row; padding is 0."""
        joined: State = {}
        assert states[0] is not None
        for key, value in states[0].items():
            if not _is_elementwise(value, self.parameters[parts[0].index]) or flat.ndim == 0:
                joined[key] = copied(value)
                continue
            joined[key] = torch.zeros(flat.shape, dtype=value.dtype)
            for part, state in zip(parts, states, strict=True):
                assert state is not None
                at = (part.start - parts[0].start) // flat.element_size()
                values = in_memory_order(state[key], self.parameters[part.index])[part.low : part.high]
                joined[key][at : at + part.high - part.low] = values
        return joined

    def _hand_over(self) -> None:
        for number, (group, others) in enumerate(zip(self.optimizer.param_groups, self.others, strict=True)):
            group["params"] = [piece.parameter for piece in self.pieces if piece.group == number] + others

    def remove(self) -> None:
        """Give the optimizer its whole parameters back, without the pieces' state."""
        for piece in self.pieces:
            self.optimizer.state.pop(piece.parameter, None)
        for group, whole in zip(self.optimizer.param_groups, self.whole, strict=True):
            group["params"] = whole
        self.pieces = []

    # ---- a step ------------------------------------------------------------------------------------------

    def part(self, present: Sequence[bool]) -> None:
        """Part the pieces in which some parameters have a gradient in this step and others have none."""
        parted = []
        for piece in self.pieces:
            parts = list(self._parts(piece.start, piece.stop))
            if len({present[part.index] for part in parts}) > 1:
                parted.append((piece, parts))
        for piece, parts in parted:
            self._split(piece, parts)
        if parted:
            self.pieces.sort(key=lambda piece: piece.start)
            self._hand_over()

    def _split(self, piece: Piece, parts: Sequence[Part]) -> None:
        self.pieces.remove(piece)
        state = self.optimizer.state.pop(piece.parameter, None)
        size = piece.parameter.element_size()
        for part in parts:
            self._add([part], [None])
            if state is not None:
                low, high = (part.start - piece.start) // size, (part.stop - piece.start) // size
                self.optimizer.state[self.pieces[-1].parameter] = {
                    k: v[low:high].clone() if _is_elementwise(v, piece.parameter) else copied(v)
                    for k, v in state.items()
                }

    def parts_of(self, piece: Piece) -> Iterator[Part]:
        """List what a piece holds of each parameter."""
        return self._parts(piece.start, piece.stop)

    def place(self, piece: Piece, part: Part) -> slice:
        """Give the elements of a piece that are those of a part."""
        low = (part.start - piece.start) // piece.parameter.element_size()
        return slice(low, low + part.high - part.low)

    # ---- state -------------------------------------------------------------------------------------------

    def states(self) -> Iterator[tuple[Part, State]]:
        """List the optimizer's state for what this rank updates of each parameter, tensors flat."""
        for piece in self.pieces:
            state = self.optimizer.state.get(piece.parameter)
            if not state:
                continue
            for part in self.parts_of(piece):
                at = self.place(piece, part)
                yield part, {k: v[at] if _is_elementwise(v, piece.parameter) else v for k, v in state.items()}


def whole_state(parameter: Tensor, parts: Sequence[tuple[Part, State]]) -> State:
    """Put the states of all parts of one parameter together."""
    parts = sorted(parts, key=lambda pair: pair[0].low)
    first = parts[0][1]
    whole: State = {}
    for key, value in first.items():
        part = parts[0][0]
        if parameter.ndim == 0 or not isinstance(value, Tensor) or value.shape != (part.high - part.low,):
            whole[key] = value
            continue
        flat = torch.empty(parameter.numel(), dtype=value.dtype)
        for part, state in parts:
            flat[part.low : part.high] = state[key]
        whole[key] = shaped(flat, parameter)
    return whole


def _is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Tell whether a value of the state has an entry for each element of a parameter."""
    return isinstance(value, Tensor) and parameter.ndim > 0 and value.shape == parameter.shape


def copied(value: Any) -> Any:
    """Copy what is a tensor: a part of one would hold the whole, in a pickle too."""
    return value.clone() if isinstance(value, Tensor) else value
