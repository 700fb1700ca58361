"""The captured model as plain values: references, nodes and the graph they form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..tree import Path


@dataclass(frozen=True, slots=True)
class Value:
    """Refer to a tensor that a node makes."""

    is_leaf: ClassVar[bool] = True
    index: int


@dataclass(frozen=True, slots=True)
class Input:
    """Refer to a tensor of the batch, by its place among the tensors in it."""

    is_leaf: ClassVar[bool] = True
    index: int


@dataclass(frozen=True, slots=True)
class Param:
    """Refer to a parameter by its (first) name in the model."""

    is_leaf: ClassVar[bool] = True
    name: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Refer to a buffer by its (first) name in the model."""

    is_leaf: ClassVar[bool] = True
    name: str


@dataclass(frozen=True, slots=True)
class Attribute:
    """Refer to a tensor that a module holds as a plain attribute."""

    is_leaf: ClassVar[bool] = True
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """Refer to an entry of the graph's table of constants (a tensor that no input reaches)."""

    is_leaf: ClassVar[bool] = True
    index: int


@dataclass(frozen=True, slots=True)
class Affine:
    """Stand for the number ``scale * batch + offset`` (batch: samples of the microbatch)."""

    is_leaf: ClassVar[bool] = True
    scale: int
    offset: int


Ref = Value | Input | Param | Buffer | Attribute | Constant
REFS = (Value, Input, Param, Buffer, Attribute, Constant)


@dataclass(frozen=True, slots=True)
class BatchNormRow:
    """Hold what couples the samples of a batch in one BatchNorm call."""

    input: Ref
    weight: Param | None
    bias: Param | None
    running_mean: Buffer | None
    running_var: Buffer | None
    momentum: float
    eps: float
    channels: int
    dtype: Any  # of the input


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Hold one recorded call: what was called on what, in which module, and what came out."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[Path, int], ...]  # path in the result -> value index
    module: str  # dotted path of the innermost module
    call: int  # number of the innermost module call
    grad: bool  # autograd was on
    autocast: tuple[Any, ...] = ()  # (device type, on, dtype) where autocast was set in the forward itself
    mutates: tuple[Ref, ...] = ()
    random: bool = False
    opaque: str = ""  # path of the module when the call is a whole module of the user's
    row: BatchNormRow | None = None
    cost: float = 0.0  # estimated seconds per sample, forward

    def refs(self) -> Iterator[Ref]:
        """Yield each reference the call reads."""
        return find_refs((self.args, self.kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInfo:
    """Hold what is known of a value: where it is made and how it looked in the trace."""

    producer: int
    shape: tuple[int, ...]
    dtype: str
    storage: int
    sendable: bool
    dynamic: bool = False  # its shape depends on data


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Hold the model's computation on one microbatch, for one structure of the batch.

    ``output`` is the structure the model returned, tensors replaced by references.
    ``rebinds`` maps a buffer to the value it is bound to after the forward.
    ``blocked`` says why the model cannot be cut at all (empty: it can).
    """

    nodes: tuple[Node, ...]
    values: dict[int, ValueInfo]
    constants: tuple[Any, ...]
    output: Any
    used_outputs: frozenset[int] | None
    rebinds: dict[str, Ref]
    training: bool
    blocked: str = ""
    opaque: dict[str, str] = field(default_factory=dict)  # module path -> why it is run as a whole
    checks: dict[tuple[str, int], Exception] = field(default_factory=dict)  # tests the graph repeats -> error
    module_params: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of opaque modules
    module_buffers: dict[str, tuple[str, ...]] = field(default_factory=dict)


def find_refs(value: Any) -> Iterator[Ref]:
    """Yield every reference inside nested arguments."""
    if isinstance(value, REFS):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_refs(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_refs(item)
    elif isinstance(value, slice):
        yield from find_refs((value.start, value.stop, value.step))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Affine):
        for f in dataclasses.fields(value):
            yield from find_refs(getattr(value, f.name))
