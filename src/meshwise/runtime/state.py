"""The whole state of a run, gathered from its ranks and put back on any other number of them.

State is kept under the model's own names and whole (no shards), so a checkpoint fits every layout.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..parallel.transport import wait_for
from .worker import Worker

STATE_TAG = 1 << 21


@dataclass(kw_only=True)
class WholeState:
    """Hold weights and buffers by name, and the optimizer's state by parameter name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def optimizer_states(worker: Worker) -> Generator[None, None, dict[str, dict[str, Any]]]:
    """Give the optimizer's whole state of this rank's parameters, by name. Every rank calls it."""
    engine = worker.engine
    if engine.commons.active:
        return (yield from engine.commons.gather_states())
    assert engine.optimizer is not None
    known = engine.optimizer.state
    return {n: dict(known[p]) for n, p in worker.model.named_parameters() if p in known}


def own_state(worker: Worker) -> Generator[None, None, WholeState]:
    """Give the state that this rank speaks for (its first-held parameters and buffers)."""
    state = WholeState()
    me = worker.engine.pp_index
    states = yield from optimizer_states(worker)
    for name, parameter in worker.model.named_parameters():
        if worker.owner(name) != me:
            continue
        state.tensors[name] = parameter.detach()
        if name in states:
            state.optimizer[name] = states[name]
    for name, buffer in _persistent_buffers(worker):
        if worker.owner(name) == me:
            state.tensors[name] = buffer
    return state


def _persistent_buffers(worker: Worker) -> list[tuple[str, Tensor]]:
    keys = set(worker.model.state_dict())
    return [(n, b) for n, b in worker.model.named_buffers() if n in keys]


def gather_state(worker: Worker) -> Generator[None, None, WholeState | None]:
    """Gather the whole state on rank 0 (None elsewhere). Every rank calls it."""
    engine = worker.engine
    own = yield from own_state(worker)
    if engine.dp_index != 0:
        return None
    plain = {n: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for n, s in own.optimizer.items()}
    index = (
        sorted(own.tensors),
        {n: sorted(k for k, v in s.items() if isinstance(v, Tensor)) for n, s in own.optimizer.items()},
        plain,
    )
    members = yield from wait_for(engine.transport.all_gather_object(index, engine.pp_group))
    if engine.pp_index != 0:
        for tensor in _in_order(own):
            engine.courier.send((tensor,), engine.pp_group[0], STATE_TAG, "state", static=False)
        engine.transport.flush()
        return None
    for source, member in list(zip(engine.pp_group, members, strict=True))[1:]:
        yield from _take(worker, own, source, member)
    _add_aliases(worker, own)
    own.extra = plain_extra(worker)
    return own


def _in_order(state: WholeState) -> list[Tensor]:
    tensors = [state.tensors[n] for n in sorted(state.tensors)]
    for name in sorted(state.optimizer):
        tensors += [
            state.optimizer[name][k]
            for k in sorted(state.optimizer[name])
            if isinstance(state.optimizer[name][k], Tensor)
        ]
    return tensors


def _take(worker: Worker, own: WholeState, source: int, member: Any) -> Generator[None, None, None]:
    names, states, plain = member
    courier = worker.engine.courier
    for name in names:
        (tensor,) = yield from courier.receive(source, STATE_TAG, "state", static=False)
        assert tensor is not None
        own.tensors[name] = tensor.detach()
    for name in sorted(states):
        own.optimizer[name] = dict(plain[name])
        for key in states[name]:
            (tensor,) = yield from courier.receive(source, STATE_TAG, "state", static=False)
            assert tensor is not None
            own.optimizer[name][key] = tensor.detach()


def _add_aliases(worker: Worker, state: WholeState) -> None:
    """Give tied parameters all their names, as the model's own state_dict does."""
    first = {id(p): n for n, p in worker.model.named_parameters()}
    first |= {id(b): n for n, b in worker.model.named_buffers()}
    for name, tensor in worker.model.state_dict(keep_vars=True).items():
        if name not in state.tensors and id(tensor) in first:
            state.tensors[name] = state.tensors[first[id(tensor)]]


def plain_extra(worker: Worker) -> dict[str, Any]:
    """Give the small facts of a run's position: step, learning rates, scheduler."""
    engine = worker.engine
    assert engine.optimizer is not None
    groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    extra: dict[str, Any] = {"step": engine.step_index, "param_groups": groups}
    if engine.scheduler is not None:
        extra["scheduler"] = {k: v for k, v in engine.scheduler.state_dict().items() if _is_plain(v)}
    return extra


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def restore_state(worker: Worker, state: WholeState) -> None:
    """Put a whole state back: each rank takes what it holds. Every rank calls it with the same state."""
    engine = worker.engine
    assert engine.optimizer is not None
    known = dict(worker.model.named_parameters())
    held = worker.held
    missing = sorted(set(known) - set(state.tensors))
    if missing:
        raise CheckpointError(f"the checkpoint has no {missing[0]!r}; it is of another model.")
    with torch.no_grad():
        for name, parameter in known.items():
            if tuple(state.tensors[name].shape) != tuple(parameter.shape):
                shapes = f"{tuple(state.tensors[name].shape)} there, {tuple(parameter.shape)} here"
                raise CheckpointError(f"the checkpoint's {name!r} has another shape ({shapes}).")
            if name in held:
                parameter.copy_(state.tensors[name])
        for name, buffer in _persistent_buffers(worker):
            if name in state.tensors:
                buffer.copy_(state.tensors[name])
    if engine.commons.active:
        engine.commons.load_states(state.optimizer)
    for name, values in state.optimizer.items():
        if name in held and not engine.commons.active:
            engine.optimizer.state[known[name]] = {
                k: v.clone().to(known[name].device if v.ndim else "cpu") if isinstance(v, Tensor) else v
                for k, v in values.items()
            }
    _restore_extra(worker, state.extra)


def _restore_extra(worker: Worker, extra: dict[str, Any]) -> None:
    engine = worker.engine
    assert engine.optimizer is not None
    engine.step_index = int(extra.get("step", 0))
    for group, saved in zip(engine.optimizer.param_groups, extra.get("param_groups", []), strict=False):
        group.update(saved)
    if engine.scheduler is not None and "scheduler" in extra:
        engine.scheduler.load_state_dict({**engine.scheduler.state_dict(), **extra["scheduler"]})
