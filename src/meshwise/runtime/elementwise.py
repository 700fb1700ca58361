"""What may be done to an optimizer without changing a bit of its result: found out by trying it on small stand-ins.

An optimizer may update pieces of parameters if it treats every element by itself; a fused or foreach kernel may take
the place of its loop if the bits are the same. Both are tried on copies, with the optimizer's own options, and only
for torch's own optimizers: code that nobody has read may do something else at a later step than it was tried for.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optim

from ..parallel.rows import RowLayout, view_like
from .pieces import Pieces

ODD = ((), (1500,), (40, 30), (3, 5, 77), (10, 9, 3, 5))  # shapes of stand-ins by dims: odd ends, some over a page
LANES = 64  # elements: whole vectors of every processor
WHOLE = ((), (192,), (30, 64), (3, 5, 128), (5, 3, 4, 64))  # the same of whole lanes
RATES = (1.0, 1.0, 0.37, 1.9, 0.0123, 7.3, 0.61, 1.0, 0.83, 2.7)  # of a step's learning rate to the first: a kernel
# that rounds its factors in another way agrees at one rate and in early steps, but not at ten
SCHEDULED: tuple[dict[str, float], ...] = ({}, {"weight_decay": 0.01}, {"momentum": 0.9})  # what a schedule may bring
LEAST_RATE = 1e-3
EACH = 3  # stand-ins at most of one dtype and number of dims in a group
KERNELS = ("fused", "foreach")

log = logging.getLogger("meshwise")


def allows_pieces(optimizer: torch.optim.Optimizer, kernel: str = "") -> bool:
    """Tell whether an optimizer gives the same bits when two ranks update pieces of its parameters.

    ``kernel``: the pieces are updated by that kernel, whole parameters by the optimizer as it is.
    """
    return _is_known(optimizer) and all(
        _agrees(optimizer, lambda o, p: _run_pieces(o, p, kernel), ODD, values)
        for values in (SCHEDULED if kernel else ({},))
    )


def same_bits(optimizer: torch.optim.Optimizer, kernel: str) -> bool:
    """Tell whether a kernel gives the bits of the optimizer's own loop, on parameters of whole :data:`LANES`."""
    return _is_known(optimizer) and all(
        _agrees(optimizer, lambda o, p: _run_whole(o, p, kernel), WHOLE, values) for values in SCHEDULED
    )


class FusedUpdate:
    """Run an optimizer's fused kernel on the parameters for which it gives the same bits, the loop on the others.

    The fused kernel reads and writes memory once where the loop does so for every operation; but what is left over
    by its vectors it rounds in another way.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, least: int = 1 << 20) -> None:
        self.optimizer = optimizer
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        large = count >= least  # else two calls cost more than the memory they spare
        self.fused = large and "fused" in kernels_for(optimizer) and same_bits(optimizer, "fused")

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        fits = [[p for p in params if p.numel() % LANES == 0 and p.is_contiguous()] for params in whole]
        if not self.fused or not any(fits):
            bare_step(self.optimizer)
            return
        rest = [[p for p in params if p.numel() % LANES or not p.is_contiguous()] for params in whole]
        try:
            self._step(fits, "fused")
            if any(p.grad is not None for params in rest for p in params):
                self._step(rest, "")
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def _step(self, parts: list[list[Any]], kernel: str) -> None:
        for group, part in zip(self.optimizer.param_groups, parts, strict=True):
            group["params"] = part
        with kernel_chosen(self.optimizer, kernel):
            bare_step(self.optimizer)


def kernels_for(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """List the kernels that may be tried: those of torch's own optimizers, where the user has chosen none."""
    groups = optimizer.param_groups
    if any(group.get(kernel) is not None for group in groups for kernel in KERNELS):
        return ()
    fused = () if torch.get_num_threads() > 1 else ("fused",)  # it would part the elements by thread
    return tuple(k for k in (*fused, "foreach") if all(k in group for group in groups))


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer without what torch wraps around it (hooks, a profiler's mark), where there are no hooks.

    For a small model that is a tenth of a step.
    """
    raw = getattr(type(optimizer).step, "__wrapped__", None)
    if raw is None or not _is_known(optimizer):
        optimizer.step()
        return
    optimizer._opt_called = True  # type: ignore[attr-defined]
    raw(optimizer)


@contextlib.contextmanager
def kernel_chosen(optimizer: torch.optim.Optimizer, kernel: str) -> Iterator[None]:
    """Let the optimizer use a kernel inside the block; its groups stay as the user made them."""
    if not kernel:
        yield
        return
    for group in optimizer.param_groups:
        group[kernel] = True
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group[kernel] = None


# ---- trying ----------------------------------------------------------------------------------------------


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is torch's own and nothing else runs in its step."""
    own = vars(optimizer).get("step")  # a scheduler's, which only notes that a step was made, or the user's
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return False
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)
    return not any((*hooks, *everywhere))


def _agrees(
    optimizer: torch.optim.Optimizer, run: Any, shapes: Sequence[tuple[int, ...]], values: dict[str, float]
) -> bool:
    """Tell whether a way to step gives the bits of the plain one, with some options set to other values."""
    try:
        expected = _run_whole(*_stand_in(optimizer, shapes, values))
        found = run(*_stand_in(optimizer, shapes, values))
    except Exception as error:  # noqa: BLE001 - whatever an optimizer raises on stand-ins
        log.debug("the optimizer does not work on stand-ins: %s: %s", type(error).__name__, error)
        return False
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(expected, found, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _stand_in(
    optimizer: torch.optim.Optimizer, shapes: Sequence[tuple[int, ...]], values: dict[str, float]
) -> tuple[torch.optim.Optimizer, list[list[nn.Parameter]]]:
    """Copy an optimizer without state, with small parameters in place of each group's: one of each dtype and dims.

    ``shapes[n]`` is that of a stand-in of n dims.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    groups: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        kinds: dict[tuple[torch.dtype, int, int], nn.Parameter] = {}
        for k, parameter in enumerate(group["params"]):
            kind = (parameter.dtype, parameter.ndim, k % EACH)
            if kind not in kinds:
                shape = shapes[parameter.ndim] if parameter.ndim < len(shapes) else (2,) * (parameter.ndim - 1) + (64,)
                kinds[kind] = nn.Parameter(_numbers(shape, generator).to(parameter.dtype))
            memo[id(parameter)] = kinds[kind]
        groups.append(list(kinds.values()))
    twin = copy.deepcopy(optimizer, memo)
    vars(twin).pop("step", None)  # a scheduler's wrapper would run the original
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for group, mine in zip(twin.param_groups, groups, strict=True):
        group["params"] = list(mine)
        group.update({key: value for key, value in values.items() if key in group})
    return twin, groups


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Give numbers of many magnitudes: where an update is as large as what it changes, every rounding shows."""
    return torch.randn(shape, generator=generator) * 10 ** (-5 * torch.rand(shape, generator=generator))


def _steps(twins: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Give the gradients of each step, the learning rates being set."""
    generator = torch.Generator().manual_seed(1)
    first = [_rate(group) for group in twins[0].param_groups]
    for rate in RATES:
        for twin in twins:
            for group, lr in zip(twin.param_groups, first, strict=True):
                group["lr"] = lr * rate
        yield [_numbers(p.shape, generator).to(p.dtype) for p in parameters]


def _rate(group: dict[str, Any]) -> Any:
    """Give a learning rate that shows what a step does: a schedule may well begin at 0."""
    lr = group["lr"]
    if float(lr) >= LEAST_RATE:
        return lr
    return torch.full_like(lr, 0.01) if isinstance(lr, Tensor) else 0.01


def _run_whole(twin: torch.optim.Optimizer, groups: list[list[nn.Parameter]], kernel: str = "") -> list[Tensor]:
    parameters = [p for mine in groups for p in mine]
    for grads in _steps([twin], parameters):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        with kernel_chosen(twin, kernel):
            twin.step()
    return list(parameters)


def _run_pieces(twin: torch.optim.Optimizer, groups: list[list[nn.Parameter]], kernel: str) -> list[Tensor]:
    """Let two copies of the optimizer update a half of the stand-ins each."""
    parameters: list[Tensor] = [p for mine in groups for p in mine]
    numbers = [g for g, mine in enumerate(groups) for _ in mine]
    layout = RowLayout.of(parameters)
    row, sums = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    for offset, parameter in zip(layout.offsets, parameters, strict=True):
        view_like(row, offset, parameter).copy_(parameter.detach())
    twins = [twin, copy.deepcopy(twin)]
    halves = []
    for member, each in enumerate(twins):
        share = layout.share(member, 2)
        halves.append(
            Pieces(row=row, layout=layout, parameters=parameters, groups=numbers, share=share, optimizer=each)
        )
        halves[-1].install()
    for grads in _steps(twins, parameters):
        for offset, grad in zip(layout.offsets, grads, strict=True):
            view_like(sums, offset, grad).copy_(grad)
        for half in halves:
            for piece in half.pieces:
                grad = sums[piece.start : piece.stop].view(piece.parameter.dtype)
                piece.parameter.grad = grad if piece.parameter.ndim else grad[0]
            with kernel_chosen(half.optimizer, kernel):
                half.optimizer.step()
    return [view_like(row, o, p) for o, p in zip(layout.offsets, parameters, strict=True)]
