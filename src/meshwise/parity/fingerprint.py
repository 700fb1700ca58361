"""Fingerprints of a run's state, step by step: what two runs must agree on to be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime.state import optimizer_states
from ..runtime.worker import drive

if TYPE_CHECKING:
    from ..session import Session

KINDS = ("samples", "loss", "gradient norm", "gradient", "weight", "optimizer state", "buffer")


@dataclass(frozen=True, kw_only=True)
class Print:
    """Hold the fingerprint of one thing after one step, and a number a person can compare."""

    digest: str
    size: float


@dataclass(kw_only=True)
class StepPrints:
    """Hold the fingerprints one rank takes after one step, by (kind, name)."""

    step: int
    num_samples: int
    ids: tuple[int, ...]
    prints: dict[tuple[str, str], Print] = field(default_factory=dict)


def digest(value: Any) -> Print:
    """Take the fingerprint of a tensor or a plain value."""
    if isinstance(value, Tensor):
        plain = value.to_dense() if value.is_sparse else value
        data = plain.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        head = f"{data.dtype}{tuple(data.shape)}".encode()
        size = float(data.double().abs().sum()) if not data.is_complex() else float(data.abs().sum())
        return Print(digest=hashlib.blake2b(head + raw, digest_size=16).hexdigest(), size=size)
    size = float(value) if isinstance(value, (int, float)) else 0.0
    text = value.hex() if isinstance(value, float) else repr(value)
    return Print(digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), size=size)


def take_prints(session: Session, num_steps: int) -> list[StepPrints]:
    """Train ``num_steps`` steps and take fingerprints of all that this rank holds after each."""
    taken = []
    for number, batch in enumerate(session.batches()):
        if number >= num_steps:
            break
        result = session.step(batch)
        batch.loaded.clear()
        prints = StepPrints(step=result.step, num_samples=result.num_samples, ids=result.ids)
        prints.prints["samples", "ids"] = digest(result.ids)
        prints.prints["loss", "loss"] = digest(result.loss)
        prints.prints["gradient norm", "norm"] = digest(result.grad_norm)
        prints.prints.update({(kind, name): digest(value) for kind, name, value in _held(session)})
        taken.append(prints)
    return taken


def _held(session: Session) -> Iterator[tuple[str, str, Any]]:
    worker = session.worker
    states = drive(optimizer_states(worker))
    held = worker.held
    for name, parameter in worker.model.named_parameters():
        if name not in held:
            continue
        yield "gradient", name, parameter.grad
        yield "weight", name, parameter
        for key, value in sorted(states.get(name, {}).items()):
            yield "optimizer state", f"{name}.{key}", value
    for name, buffer in worker.model.named_buffers():
        if worker.owner(name) == worker.engine.pp_index:
            yield "buffer", name, buffer


def stages_of(session: Session) -> dict[str, int]:
    """Give the stage that uses each parameter first."""
    staged = session.worker.staged
    found: dict[str, int] = {}
    for stage in range(len(staged.stages)):
        for name in staged.stage_params(stage):
            found.setdefault(name, stage)
    return found
