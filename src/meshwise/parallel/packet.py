"""Carry tensors between stages with the memory layout they had, so that the next kernel sees the same bits.

A header says shape, strides, dtype and whether a gradient comes back. It goes ahead of the first packet of
its kind; afterwards both sides remember it, unless the graph's shapes may depend on data.
"""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .flats import ALIGNMENT, is_dense
from .transport import Pending, Transport, wait_for

HEADER_TAG = 1 << 24  # added to a packet's tag for its header; + 2 << 24 for the header's length


@dataclass(frozen=True, slots=True)
class Form:
    """Describe one tensor of a packet (None stands for no tensor)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    dense: bool  # the elements fill their memory; else the packet holds a contiguous copy
    contiguous: bool
    num_bytes: int  # that travel


@dataclass(frozen=True)
class Header:
    """Describe the tensors of a packet, and where each begins in its bytes."""

    forms: tuple[Form | None, ...]

    @functools.cached_property
    def alone(self) -> int | None:
        """Give the place of the packet's only tensor: it travels as it is; None where there are none or several."""
        present = [k for k, form in enumerate(self.forms) if form is not None]
        return present[0] if len(present) == 1 else None

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Give the byte at which each tensor begins, and after the last one the length of all."""
        sizes = (0 if form is None else -(-form.num_bytes // ALIGNMENT) * ALIGNMENT for form in self.forms)
        return (0, *itertools.accumulate(sizes))

    @functools.cached_property
    def num_bytes(self) -> int:
        """Count the bytes of the packet."""
        if self.alone is None:
            return self.offsets[-1]
        form = self.forms[self.alone]
        assert form is not None
        return form.num_bytes


def _usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Give the strides of a tensor that torch itself would make in this shape."""
    products = itertools.accumulate((max(1, size) for size in reversed(shape[1:])), operator.mul, initial=1)
    return tuple(products)[::-1] if shape else ()


def form_of(tensor: Tensor | None) -> Form | None:
    """Describe a tensor."""
    if tensor is None:
        return None
    core = unexpand(tensor)
    return Form(
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        dense=is_dense(core),
        contiguous=tensor.stride() == _usual_strides(tensor.shape),
        num_bytes=core.numel() * core.element_size(),
    )


def _fits(tensors: tuple[Tensor | None, ...], header: Header) -> bool:
    """Tell whether tensors still look as the header says."""
    return len(tensors) == len(header.forms) and all(map(_alike, tensors, header.forms))


def _alike(tensor: Tensor | None, form: Form | None) -> bool:
    if tensor is None or form is None:
        return tensor is None and form is None
    return (
        tensor.shape == form.shape
        and tensor.stride() == form.stride
        and tensor.dtype == form.dtype
        and tensor.requires_grad == form.requires_grad
    )


def unexpand(tensor: Tensor) -> Tensor:
    """Narrow expanded (stride 0) dims to one element."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def flat_bytes(tensor: Tensor, form: Form) -> Tensor:
    """View (or copy) what travels of a tensor, contiguous and in memory order; as bytes where it is no whole one."""
    if form.contiguous:
        return tensor.detach()
    core = unexpand(tensor.detach())
    if form.dense and core.numel():
        flat = core.as_strided((core.numel(),), (1,), core.storage_offset())
    else:
        flat = core.contiguous().reshape(-1)
    return flat.view(torch.uint8)


def restore(flat: Tensor, form: Form) -> Tensor:
    """Rebuild a tensor of ``form`` from its bytes."""
    if form.contiguous:
        values = flat.view(form.dtype)
        return values.view(*form.shape) if form.shape else values.view(())  # numbers are read faster than a tuple
    core = tuple(s if st != 0 or s < 2 else 1 for s, st in zip(form.shape, form.stride, strict=True))
    values = flat.view(form.dtype)
    if form.dense:
        tensor = values.as_strided(core, form.stride)
    else:
        span = 1 + sum((s - 1) * st for s, st in zip(core, form.stride, strict=True)) if values.numel() else 0
        tensor = torch.empty(span, dtype=form.dtype, device=flat.device).as_strided(core, form.stride)
        tensor.copy_(values.view(core))
    return tensor.expand(form.shape)


class Courier:
    """Send and receive packets over a transport, remembering headers by key."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport = transport
        self.device = device
        self.sent: dict[Hashable, Header] = {}
        self.known: dict[Hashable, Header] = {}
        self.num_bytes = 0

    def send(
        self, tensors: tuple[Tensor | None, ...], to: int, tag: int, key: Hashable, *, static: bool
    ) -> None:
        """Send a packet; ``key`` names packets that look alike, ``static`` says that they always do."""
        header = self.sent.get(key) if static else None
        if header is None:
            header = Header(tuple(form_of(t) for t in tensors))
            data = torch.frombuffer(bytearray(pickle.dumps(header.forms)), dtype=torch.uint8).to(self.device)
            self.transport.send(torch.tensor([data.numel()], device=self.device), to, tag + 2 * HEADER_TAG)
            self.transport.send(data, to, tag + HEADER_TAG)
            self.sent[key] = header
        assert _fits(tensors, header), f"packet {key} changed its form: {header} -> {tuple(map(form_of, tensors))}"
        if header.num_bytes:
            self.num_bytes += header.num_bytes
            self.transport.send(self._payload(tensors, header), to, tag)

    def _payload(self, tensors: tuple[Tensor | None, ...], header: Header) -> Tensor:
        if header.alone is not None:
            tensor, form = tensors[header.alone], header.forms[header.alone]
            assert tensor is not None and form is not None
            return flat_bytes(tensor, form)
        payload = torch.empty(header.num_bytes, dtype=torch.uint8, device=self.device)
        for tensor, form, offset in zip(tensors, header.forms, header.offsets, strict=False):
            if tensor is not None and form is not None:
                payload[offset : offset + form.num_bytes].copy_(flat_bytes(tensor, form).reshape(-1).view(torch.uint8))
        return payload

    def post(self, source: int, tag: int, key: Hashable, *, static: bool) -> PostedPacket | None:
        """Start receiving a packet whose header is known; None when it is not known yet."""
        header = self.known.get(key) if static else None
        return self._post(source, tag, header) if header is not None else None

    def _post(self, source: int, tag: int, header: Header) -> PostedPacket:
        total = header.num_bytes
        return PostedPacket(header, self.transport.receive(total, source, tag) if total else None, self.device)

    def receive(
        self, source: int, tag: int, key: Hashable, *, static: bool
    ) -> Generator[None, None, tuple[Tensor | None, ...]]:
        """Receive a packet, its header first where it is not known."""
        posted = self.post(source, tag, key, static=static)
        if posted is None:
            length = yield from wait_for(self.transport.receive(8, source, tag + 2 * HEADER_TAG))
            size = int(length.view(torch.int64))
            data = yield from wait_for(self.transport.receive(size, source, tag + HEADER_TAG))
            self.known[key] = Header(pickle.loads(bytes(data.cpu().numpy())))
            posted = self._post(source, tag, self.known[key])
        return (yield from posted.finish())


@dataclass
class PostedPacket:
    """Hold a packet on its way."""

    header: Header
    pending: Pending | None
    device: torch.device

    def finish(self) -> Generator[None, None, tuple[Tensor | None, ...]]:
        """Wait for the packet and rebuild its tensors; those that want a gradient become leaves."""
        header = self.header
        if self.pending is not None:
            buffer = yield from wait_for(self.pending)
        else:
            buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        if header.alone is not None:
            return tuple([None if form is None else _leaf(buffer, form) for form in header.forms])
        pairs = zip(header.forms, header.offsets, strict=False)
        return tuple(None if f is None else _leaf(buffer[o : o + f.num_bytes], f) for f, o in pairs)


def _leaf(flat: Tensor, form: Form) -> Tensor:
    tensor = restore(flat, form).detach()
    return tensor.requires_grad_() if form.requires_grad else tensor
