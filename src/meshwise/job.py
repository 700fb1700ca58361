"""The job: what to train, with no word about devices. Checked once, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .errors import JobError
from .grid import DEFAULT_SLOTS, default_microbatch_size

if TYPE_CHECKING:
    from torch import nn

LOSS_KINDS = ("auto", "sum", "mean", "items", "batch")
PRECISIONS = ("own", "float64", "bf16")


@dataclass(frozen=True, kw_only=True)
class Job:
    """State one training job as one device would run it.

    ``model``: an ``nn.Module``, or a function without arguments that builds one (under ``seed``).
    ``loss(output, target)`` for tuple batches, ``loss(output, batch)`` for dict batches; leave it out for a
    model that returns its own loss. ``optimizer(params)`` builds a torch optimizer; ``param_groups(name,
    parameter)`` may give the options of each parameter's group. ``batch_size``: samples per optimizer step
    on any number of devices. ``microbatch_size``: samples computed at once, an int or a list; by default
    the smallest that makes at most 8 microbatches; "auto" lets ``train`` and ``plan`` choose it, which say what to
    write here so that the run can be repeated. ``slots``: leaves of the reduction tree (default 8), the
    most replicas that can share a step. ``loss_kind``: how losses of parts make the loss of the whole (found
    out by itself unless given): sum, mean (over samples), items (over valid targets), batch (coupled).
    ``weight(batch)``: samples or valid tokens of a microbatch. ``forward(model, batch)`` overrides the call.
    ``precision``: "own" (as the model is), "float64" (model and data are cast) or "bf16" (autocast).
    ``batch_norm``: "batch" (statistics of the whole batch) or "microbatch". ``cuts``: modules at which
    stages begin. ``on_nonfinite``: "stop" or "skip" a step whose loss is not finite.
    Raises JobError for a value that cannot work.
    """

    model: nn.Module | Callable[[], nn.Module]
    optimizer: Callable[..., Any]
    train_data: Any
    batch_size: int
    loss: Callable[[Any, Any], Any] | None = None
    eval_data: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    microbatch_size: int | Sequence[int] | str | None = None
    slots: int = DEFAULT_SLOTS
    epochs: int = 1
    seed: int = 0
    clip_grad_norm: float | None = None
    clip_norm_type: float = 2.0
    scheduler: Callable[[Any], Any] | None = None
    param_groups: Callable[[str, Any], Mapping[str, Any]] | None = None
    forward: Callable[[Any, Any], Any] | None = None
    weight: Callable[[Any], float] | None = None
    loss_kind: str = "auto"
    batch_norm: str = "batch"
    cuts: Sequence[str] = ()
    precision: str = "own"
    shuffle: bool = True
    drop_last: bool = False
    on_nonfinite: str = "stop"
    num_workers: int = 0
    name: str = "job"

    def __post_init__(self) -> None:
        for name in ("batch_size", "slots"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise JobError(f"{name}={getattr(self, name)!r}; it must be a whole number of at least 1.")
        if not isinstance(self.epochs, int) or self.epochs < 0:
            raise JobError(f"epochs={self.epochs!r}; it must be a whole number of at least 0.")
        self._check_choice("loss_kind", LOSS_KINDS)
        self._check_choice("batch_norm", ("batch", "microbatch"))
        self._check_choice("on_nonfinite", ("stop", "skip"))
        self._check_choice("precision", PRECISIONS)
        self._check_microbatches()
        for name in ("model", "optimizer"):
            if not callable(getattr(self, name)):
                how = (
                    "an nn.Module or a function that builds one"
                    if name == "model"
                    else ("a function like lambda params: torch.optim.SGD(params, lr=0.1)")
                )
                raise JobError(f"{name}= must be {how}, not an object of type {type(getattr(self, name)).__name__}.")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise JobError(f"clip_grad_norm={self.clip_grad_norm}; it must be above 0, or None for no clipping.")

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        if getattr(self, name) not in choices:
            raise JobError(f"{name}={getattr(self, name)!r}; use one of {', '.join(choices)}.")

    def _check_microbatches(self) -> None:
        size = self.microbatch_size
        if size == "auto":
            return
        if isinstance(size, str):
            raise JobError(f'microbatch_size={size!r}; it must be a whole number, a list of them, or "auto".')
        sizes = [] if size is None else [size] if isinstance(size, int) else list(size)
        if any(not isinstance(n, int) or n < 1 for n in sizes):
            raise JobError(f"microbatch_size={size!r}; it must be a whole number of at least 1, or a list of them.")
        if len(sizes) > 1 and sum(sizes) != self.batch_size:
            raise JobError(
                f"microbatch_size={list(sizes)!r} adds up to {sum(sizes)}, but batch_size={self.batch_size}; "
                "make them equal."
            )

    @property
    def microbatch(self) -> int | tuple[int, ...]:
        """Give the microbatch size (or sizes) in force. Raises JobError while it is "auto"."""
        if isinstance(self.microbatch_size, str):
            raise JobError(
                'microbatch_size="auto" is settled by meshwise.train and meshwise.plan; everywhere else write the size '
                "that they chose."
            )
        if self.microbatch_size is None:
            return default_microbatch_size(self.batch_size)
        if isinstance(self.microbatch_size, int):
            return min(self.microbatch_size, self.batch_size)
        return tuple(self.microbatch_size)

    def with_fields(self, **changes: Any) -> Job:
        """Give a copy of the job with some fields changed. Raises JobError for an unknown field."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise JobError(f"{name!r} is no field of a Job; known are {', '.join(known)}.")
        return replace(self, **changes)
