"""What the tests of the shared update share: optimizers of two kinds, and jobs for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from meshwise.job import Job
from meshwise.runtime.state import WholeState, gather_state
from meshwise.runtime.worker import Worker, drive_together
from scenarios import (
    Run,
    Scale,
    adamw,
    make_job,
    random_rows,
)

Make = Callable[[Any], Optimizer]


def is_shared(run: Run) -> bool:
    """Tell whether all replicas of a run hold their parameters in shared memory; they must agree."""
    (active,) = {worker.engine.commons.active for worker in run.workers}
    return active


# ---- which optimizers ----------------------------------------------------------------------------------------


class Plain(Optimizer):
    """Descend; subclasses say how far for a parameter, given what they look at."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.change(p, place, group["lr"])

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update a parameter, the ``place``-th of its group."""
        assert p.grad is not None
        p.add_(p.grad, alpha=-lr)


class ByNorm(Plain):
    """Scale by the norms of the whole parameter and gradient, as LARS and LAMB do."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update by the ratio of the norms."""
        assert p.grad is not None
        p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-lr)


class ByNumDims(Plain):
    """Decay matrices, not vectors."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update and perhaps decay."""
        p.mul_(1 - lr * (0.1 if p.ndim > 1 else 0.0))
        super().change(p, place, lr)


class ByPlace(Plain):
    """Go less far the further behind a parameter is in its group."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update by the place."""
        super().change(p, place, lr / (1 + place))


class ConvsCentred(Plain):
    """Take the mean off the gradients of convolutions, as gradient centralization does; there alone."""

    def change(self, p: Tensor, place: int, lr: float) -> None:
        """Update with a centred gradient."""
        assert p.grad is not None
        if p.ndim > 3:
            p.grad = p.grad - p.grad.mean(dim=(1, 2, 3), keepdim=True)
        super().change(p, place, lr)


def hooked(params: Any) -> Optimizer:
    """Halve the gradients before a step."""
    optimizer = SGD(params, lr=0.01)

    def halve(opt: Optimizer, args: Any, kwargs: Any) -> None:
        for p in opt.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer


def muon(params: Any) -> Optimizer:
    """Make Muon where this torch has it."""
    made: Optimizer = torch.optim.Muon(params, lr=0.01)
    return made


def adafactor(params: Any) -> Optimizer:
    made: Optimizer = torch.optim.Adafactor(params, lr=0.01)
    return made


ELEMENTWISE: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.01),
    "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adamax": lambda p: Adamax(p, lr=0.01),
}
WHOLE: dict[str, Make] = {
    "own": Plain,  # nobody but its author knows what it does at a later step
    "adafactor": adafactor,
    "muon": muon,
    "hook": hooked,
    "norm": ByNorm,
    "ndim": ByNumDims,
    "place": ByPlace,
    "conv": ConvsCentred,
}
if not hasattr(torch.optim, "Muon"):  # torch 2.9 has it
    del WHOLE["muon"]
each_elementwise = pytest.mark.parametrize("name", ELEMENTWISE)
each_whole = pytest.mark.parametrize("name", WHOLE)


class Matrices(nn.Module):
    """Layers without biases, of odd sizes: what every optimizer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 41, bias=False), nn.Linear(41, 30, bias=False)
        self.third = nn.Linear(30, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map 7 features to 3."""
        out: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Images(nn.Module):
    """A convolution whose weights lie channels-last, a vector, a parameter of no dims, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = Scale(1.5)
        self.last = nn.Linear(5 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of 75 numbers, images of 5 x 5, to 3."""
        found = torch.relu(self.conv(x.view(-1, 3, 5, 5)))
        out: Tensor = self.last(self.scale(found).flatten(1))
        return out


def job_of(model: type[nn.Module], features: int, **fields: Any) -> Job:
    """Make a job of 20 samples in steps of 8, 8 and 4, in float64."""
    data = [(random_rows(features, seed=k), random_rows(3, seed=k + 100)) for k in range(20)]
    given = {"batch_size": 8, "microbatch_size": 2, "optimizer": adamw(), "precision": "float64", **fields}
    return make_job(model, data, **given)


def matrices(**fields: Any) -> Job:
    return job_of(Matrices, 7, **fields)


def images(**fields: Any) -> Job:
    return job_of(Images, 75, **fields)


def state_of(workers: Sequence[Worker]) -> WholeState:
    """Gather the whole state, as it stands now."""
    (found,) = [s for s in drive_together([gather_state(w) for w in workers]) if s is not None]
    return copy.deepcopy(found)  # type: ignore[no-any-return]
