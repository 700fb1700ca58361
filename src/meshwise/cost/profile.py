"""What is known of a model before it is laid out: its units with their work, bytes and (measured) seconds.

All figures of a unit are for one microbatch of ``Profile.microbatch_size`` samples on one device that holds the whole
unit. Bytes of values are those of tensors (no allocator); times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHARDS = ("none", "column", "row", "heads", "inner", "vocab")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Count what one kind of operation does in a unit.

    ``kind``: "matmul", "attention", "conv", "memory" (bound by bytes) or "uncounted" (nothing is known: it is
    reported, never taken as free). FLOPs count a multiply-add as 2. ``bytes``: read and written in device memory.
    ``shard`` says how tp would part it: a "column" or "row" parallel product, attention by "heads", elementwise work
    "inner" to a sharded pair, a product with the "vocab"; "none" is done whole by every tp rank (and parted by
    sequence where the layout shards sequences). ``count`` of them, ``forward_count`` in the forward. ``shape`` of a
    product: (how many, rows, columns, summed over); a convolution as the product that it is, in both directions.
    """

    op: str
    kind: str
    count: int = 1
    forward_count: int = 0
    dtype: str = "fp32"
    forward_flops: float = 0.0
    backward_input_flops: float = 0.0
    backward_weight_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    shard: str = "none"
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSeconds:
    """Hold measured seconds of one cell; ``backward`` is the whole one, its two halves also apart."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProfile:
    """Hold one unit.

    ``saved_bytes`` are made in its forward and stay alive to its backward (each storage once; parameters, buffers and
    the batch not counted); ``saved_input_bytes``: what it takes over the boundary and is the first to save;
    ``saved_sharded_bytes`` is the part of both that tp divides. ``forward_peak_bytes`` and ``backward_peak_bytes``: the
    most that is allocated during its forward or backward above what is alive when that begins. ``boundary_bytes``:
    values that cross to the next unit (what a pipeline sends if it is cut there); ``boundary_grad_bytes``: the part of
    them that has gradients; ``boundary_unsaved_bytes``: the part that no unit so far has saved. ``params``: what it
    uses. ``batch_bytes``: the part of the microbatch it reads. ``again_bytes``: what its block has alive beside it when
    it runs again in the backward (``again_sharded_bytes``: the part that tp divides). ``tp_reduces``: all-reduces of tp
    in its forward, as many in its backward, of ``tp_reduce_bytes`` each.
    """

    name: str
    params: tuple[str, ...] = ()
    work: tuple[Work, ...] = ()
    seconds: CellSeconds | None = None
    saved_bytes: float = 0.0
    saved_input_bytes: float = 0.0
    saved_sharded_bytes: float = 0.0
    forward_peak_bytes: float = 0.0
    backward_peak_bytes: float = 0.0
    boundary_bytes: float = 0.0
    boundary_grad_bytes: float = 0.0
    boundary_unsaved_bytes: float = 0.0
    batch_bytes: float = 0.0
    again_bytes: float = 0.0
    again_sharded_bytes: float = 0.0
    tp_reduces: int = 0
    tp_reduce_bytes: float = 0.0
    is_row: bool = False  # couples the samples of the batch (BatchNorm over all microbatches)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterProfile:
    """Hold one parameter, counted once however many names it has.

    ``optimizer_bytes``: state that the optimizer keeps for it. ``tp_sharded``: whether tp divides it.
    """

    name: str
    num_elements: int
    num_bytes: int
    trainable: bool = True
    optimizer_bytes: int = 0
    tp_sharded: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Hold a model at one microbatch size.

    ``batch_bytes``: one microbatch's data. ``load_seconds``: bringing it. ``begin_seconds``: what a step costs beside
    its cells. ``update_seconds``: the optimizer on all parameters. ``accumulate_seconds``: adding all gradients once
    more. ``peak_bytes`` is the resident memory of whole steps above that of a rank without a job, ``file_bytes`` the
    part of it that is libraries' own pages, ``build_bytes`` the most that building the model and looking into it takes
    beside.
    ``contention``: how much longer cells take when all devices of the host compute (1.0: nothing).
    ``uncounted``: operations nothing is known about, with how often they occur.
    """

    microbatch_size: int
    units: tuple[UnitProfile, ...]
    parameters: Mapping[str, ParameterProfile]
    buffers: Mapping[str, int] = field(default_factory=dict)  # bytes by name, each once
    buffer_bytes: int = 0
    batch_bytes: float = 0.0
    load_seconds: float = 0.0
    begin_seconds: float = 0.0
    update_seconds: float = 0.0
    accumulate_seconds: float = 0.0
    contention: float = 1.0
    num_steps: int = 0  # timed steps that the seconds are medians of
    peak_bytes: float | None = None  # what steps of ``peak_microbatches`` on one device were measured to take
    peak_microbatches: int = 0
    file_bytes: float = 0.0
    build_bytes: float = 0.0
    uncounted: Mapping[str, int] = field(default_factory=dict)
    blocked: str = ""  # why the model cannot be cut, empty where it can
    notes: tuple[str, ...] = ()
