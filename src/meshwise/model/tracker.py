"""Follow the operators of a run, on real or fake tensors: which memory is alive, and what work each does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .watch import storage_of, tensors_in

aten = torch.ops.aten
ATTENTION = "scaled_dot_product"
CONVOLUTIONS = ("convolution",)
# Operators that look at each element a fixed number of times, though torch does not tag them so.
STREAMING = frozenset(
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm native_batch_norm"
    " native_group_norm native_layer_norm_backward native_batch_norm_backward native_group_norm_backward"
    " batch_norm_stats"
    " _native_batch_norm_legit _native_batch_norm_legit_no_stats _native_batch_norm_legit_functional"
    " _fused_rms_norm _fused_rms_norm_backward cudnn_batch_norm cudnn_batch_norm_backward"
    " embedding embedding_dense_backward index_select index index_put index_add gather scatter scatter_add cat stack"
    " nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward"
    " smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_backward l1_loss kl_div"
    " max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d"
    " _adaptive_avg_pool2d_backward mean sum amax amin max min argmax argmin prod var var_mean std norm cumsum any all"
    " constant_pad_nd upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward"
    " native_dropout native_dropout_backward bernoulli bernoulli_ clone copy _to_copy contiguous fill zero zeros"
    " zeros_like"
    " ones ones_like empty empty_like new_zeros new_empty new_ones full full_like arange tril triu masked_fill where"
    " masked_scatter roll flip repeat repeat_interleave expand_copy slice_backward select_backward slice_scatter"
    " select_scatter as_strided_scatter linalg_vector_norm topk sort unfold unfold_backward col2im im2col new_full"
    " rand rand_like randn randn_like randint uniform normal lift_fresh_copy scalar_tensor gelu_backward"
    " threshold_backward"
    " empty_strided one_hot logsumexp logcumsumexp glu glu_backward prelu isin nonzero _unsafe_view reflection_pad2d"
    " bucketize searchsorted _local_scalar_dense set_data _embedding_bag _embedding_bag_backward dropout".split()
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Hold what one operator did: its name, its kind (see ``cost.profile.Work``), FLOPs and bytes read and written.

    ``shape`` of a product: how many there are, rows, columns, and what is summed over; a convolution as a product.
    """

    name: str
    kind: str
    dtype: str
    flops: float
    num_bytes: float
    inputs: tuple[int, ...]  # storages
    outputs: tuple[int, ...]
    shape: tuple[int, ...] = ()


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note every operator, and the bytes of all tensors that it makes until they are freed.

    ``live`` and ``peak`` are bytes, memory in ``known`` tensors not counted. ``note``, when given, gets each operation.
    """

    def __init__(self, known: Iterable[Tensor] = (), note: Callable[[Operation], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}  # storages alive that were made here
        self.guards: dict[int, Any] = {}
        self.known = {storage_of(t) for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = tensors_in(result)
        for tensor in made:
            self._hold(tensor)
        if self.note is not None:
            operation = describe_operation(func, args, kwargs, result, made)
            if operation is not None:
                self.note(operation)
        return result

    def begin(self) -> int:
        """Start a new peak from what is alive now, and give that."""
        self.peak = self.live
        return self.live

    def size(self, tensor: Tensor) -> int:
        """Give the bytes of a tensor's memory if it was made here and is alive, else 0."""
        storage = storage_of(tensor)
        return 0 if storage is None else self.sizes.get(storage, 0)

    def _hold(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage in self.sizes or storage in self.known:
            return
        held = tensor.untyped_storage()
        size = held.nbytes()
        self.sizes[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        self.guards[storage] = weakref.ref(held, lambda _: self._free(storage))

    def _free(self, storage: int) -> None:
        self.live -= self.sizes.pop(storage, 0)
        self.guards.pop(storage, None)


def describe_operation(func: Any, args: Any, kwargs: Any, result: Any, made: list[Tensor]) -> Operation | None:
    """Count an operator's FLOPs and bytes; None for one that only looks at memory in another way."""
    packet = func.overloadpacket
    name = packet.__name__.removesuffix("_")
    read = [t for t in tensors_in((args, kwargs)) if t.numel()]
    inputs = tuple(s for s in map(storage_of, read) if s is not None)
    outputs = tuple(s for s in map(storage_of, made) if s is not None)
    mutable = func._schema.is_mutable
    if not made or (not mutable and set(outputs) <= set(inputs)):
        return None
    kind, flops = _kind(packet, name, func, args, kwargs, result)
    shaped_only = name.startswith("new_") or name.endswith("_like")  # what is made from a tensor without reading it
    moved = (0 if shaped_only else sum(_bytes(t) for t in read)) + sum(_bytes(t) for t in made)
    if name.startswith(("empty", "new_empty", "detach")):
        return None
    floats = [t.dtype for t in (*read, *made) if t.is_floating_point()]
    dtype = dtype_name(floats[0]) if floats else "fp32"
    return Operation(name, kind, dtype, flops, float(moved), inputs, outputs, _shape(kind, read, made))


def _kind(packet: Any, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, float]:
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
        if ATTENTION in name or "attention" in name:
            return "attention", flops
        return ("conv" if any(c in name for c in CONVOLUTIONS) else "matmul"), flops
    if ATTENTION in name:
        causal = kwargs.get("is_causal", False) or any(a is True for a in args)  # it is their only flag
        return "attention", _attention_flops(args, backward="backward" in name) * (0.5 if causal else 1.0)
    streams = torch.Tag.pointwise in func.tags or name in STREAMING or torch.Tag.reduction in func.tags
    return ("memory" if streams or name.endswith(("_backward", "_copy")) else "uncounted"), 0.0


def _shape(kind: str, read: list[Tensor], made: list[Tensor]) -> tuple[int, ...]:
    """Give (number, rows, columns, summed over) of products.

    Of attention: (batch * heads, queries, keys, size of a head). Of a convolution, backward too, its forward's as a
    product, and the area of its kernel where its output is as large as its input (else 1).
    """
    if kind == "matmul" and len(read) >= 2 and read[-1].dim() in (2, 3) and read[-2].dim() == read[-1].dim():
        a, b = read[-2], read[-1]
        return (a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
    if kind == "conv" and len(read) >= 2:
        back = len(read) > 2 and read[2].dim() == read[0].dim()  # (gradient, input, weight)
        source, weight, out = (read[1], read[2], read[0]) if back else (read[0], read[1], made[0])
        whole = source.shape[2:] == out.shape[2:]
        area = weight[0, 0].numel() if whole else 1
        return (1, out.numel() // max(1, out.shape[1]), weight.shape[0], weight[0].numel(), area)
    if kind == "attention":
        q, k = read[1:3] if len(made) > 2 or len(read) > 4 else read[:2]  # backward: the gradient comes first
        return (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    return ()


def _attention_flops(args: Any, *, backward: bool) -> float:
    """Count q @ k and p @ v, and their five products in the backward (one is made again), over the whole square."""
    q, k, v = [t for t in args if isinstance(t, Tensor)][int(backward) : 3 + int(backward)]
    batch, heads, length, width = q.shape
    products = 2.0 * batch * heads * length * k.shape[-2]
    return products * (3 * width + 2 * v.shape[-1] if backward else width + v.shape[-1])


def _bytes(tensor: Tensor) -> int:
    """Count the bytes that reading a tensor moves: expanded dims lie in memory once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ():
        count *= size if stride else 1
    return count * tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as devices' facts do: fp32, bf16, fp16, fp64, fp8."""
    text = str(dtype).removeprefix("torch.")
    if text.startswith("float8"):
        return "fp8"
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(text, "fp32")
