"""Carry tensors between stages with the memory layout they had, so that the next kernel sees the same bits.

A header says shape, strides, dtype and whether a gradient comes back. It goes ahead of the first packet of
its kind; afterwards both sides remember it, unless the graph's shapes may depend on data.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .transport import Pending, Transport

HEADER_TAG = 1 << 24  # added to a packet's tag for its header; + 2 << 24 for the header's length


@dataclass(frozen=True, slots=True)
class Form:
    """Describe one tensor of a packet (None stands for no tensor)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    dense: bool  # the elements fill their memory; else the packet holds a contiguous copy

    @property
    def num_bytes(self) -> int:
        """Count the bytes that travel."""
        count = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride != 0 or size < 2 else 1
        return count * self.dtype.itemsize


Header = tuple[Form | None, ...]


def form_of(tensor: Tensor | None) -> Form | None:
    """Describe a tensor."""
    if tensor is None:
        return None
    return Form(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, _is_dense(unexpand(tensor))
    )


def _fits(tensors: tuple[Tensor | None, ...], header: Header) -> bool:
    """Tell whether tensors still look as the header says."""
    return len(tensors) == len(header) and all(map(_alike, tensors, header))


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


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def flat_bytes(tensor: Tensor, form: Form) -> Tensor:
    """View (or copy) what travels of a tensor as a flat array of bytes, in memory order."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1).view(torch.uint8)
    core = unexpand(tensor.detach())
    if form.dense and core.numel():
        flat = core.as_strided((core.numel(),), (1,), core.storage_offset())
    else:
        flat = core.contiguous().reshape(-1)
    return flat.view(torch.uint8)


def restore(flat: Tensor, form: Form) -> Tensor:
    """Rebuild a tensor of ``form`` from its bytes."""
    core = tuple(s if st != 0 or s < 2 else 1 for s, st in zip(form.shape, form.stride, strict=True))
    values = flat.view(form.dtype)
    if form.dense:
        tensor = values.as_strided(core, form.stride)
    else:
        span = 1 + sum((s - 1) * st for s, st in zip(core, form.stride, strict=True)) if values.numel() else 0
        tensor = torch.empty(span, dtype=form.dtype, device=flat.device).as_strided(core, form.stride)
        tensor.copy_(values.view(core))
    return tensor.expand(form.shape)


def _offsets(header: Header) -> tuple[list[int], int]:
    offsets, total = [], 0
    for form in header:
        offsets.append(total)
        total += -(-form.num_bytes // 64) * 64 if form is not None else 0
    return offsets, total


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
            header = tuple(form_of(t) for t in tensors)
            data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8).to(self.device)
            self.transport.send(torch.tensor([data.numel()], device=self.device), to, tag + 2 * HEADER_TAG)
            self.transport.send(data, to, tag + HEADER_TAG)
            self.sent[key] = header
        assert _fits(tensors, header), f"packet {key} changed its form: {header} -> {tuple(map(form_of, tensors))}"
        payload = self._payload(tensors, header)
        if payload.numel():
            self.num_bytes += payload.numel()
            self.transport.send(payload, to, tag)

    def _payload(self, tensors: tuple[Tensor | None, ...], header: Header) -> Tensor:
        present = [(t, f) for t, f in zip(tensors, header, strict=True) if t is not None and f is not None]
        if len(present) == 1:
            return flat_bytes(*present[0])
        offsets, total = _offsets(header)
        payload = torch.empty(total, dtype=torch.uint8, device=self.device)
        for tensor, form, offset in zip(tensors, header, offsets, strict=True):
            if tensor is not None and form is not None:
                payload[offset : offset + form.num_bytes].copy_(flat_bytes(tensor, form))
        return payload

    def post(self, source: int, tag: int, key: Hashable, *, static: bool) -> PostedPacket | None:
        """Start receiving a packet whose header is known; None when it is not known yet."""
        header = self.known.get(key) if static else None
        return self._post(source, tag, header) if header is not None else None

    def _post(self, source: int, tag: int, header: Header) -> PostedPacket:
        present = [f for f in header if f is not None]
        total = present[0].num_bytes if len(present) == 1 else _offsets(header)[1]
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
            self.known[key] = pickle.loads(bytes(data.cpu().numpy()))
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
        if self.pending is not None:
            buffer = yield from wait_for(self.pending)
        else:
            buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        alone = sum(f is not None for f in self.header) == 1
        offsets, _ = _offsets(self.header)
        return tuple(
            None
            if f is None
            else _leaf(buffer[0 if alone else o : (0 if alone else o) + f.num_bytes], f)
            for f, o in zip(self.header, offsets, strict=True)
        )


def _leaf(flat: Tensor, form: Form) -> Tensor:
    tensor = restore(flat, form).detach()
    return tensor.requires_grad_() if form.requires_grad else tensor


def wait_for(pending: Pending) -> Generator[None, None, Any]:
    """Yield until a result is there, then give it."""
    while not pending.ready():
        yield
    return pending.wait()
