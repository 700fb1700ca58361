"""Prove that a layout computes what one device computes: the same bits, step by step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from .errors import MeshwiseError, VerifyError
from .job import Job
from .launch.forkserver import warm
from .launch.local import run_ranks
from .layout import Layout
from .parity.fingerprint import KINDS, StepPrints, stages_of, take_prints
from .parity.plain import NoDropout, compare_plain
from .session import Session, choose_layout

PLAIN_TOLERANCE = 1e-10  # float64, relative to max(1, |value|): rounding of another order of additions

CAUSES = {
    "samples": "the data order differs: a sampler or dataset that depends on the rank",
    "loss": "the forward differs: code in the model or loss that draws random numbers or keeps state of its own, "
    "or a kernel that takes another path",
    "gradient norm": "the gradients differ (see the first gradient below), or a norm hook of the user's",
    "gradient": "the backward differs: a custom autograd function, a hook, or state kept between microbatches",
    "weight": "the gradients agree, so the optimizer differs: does it look at several parameters at once?",
    "optimizer state": "the gradients agree, so the optimizer differs: does it look at several parameters at once?",
    "buffer": "a buffer is changed by code that depends on which microbatches a rank has",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Name the first thing in which two runs differ."""

    step: int
    kind: str
    name: str
    rank: int
    stage: int | None
    one_device: float
    here: float

    def __str__(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        what = self.kind if self.kind == self.name else f'{self.kind} "{self.name}"'
        return (
            f"step {self.step}: {what} differs on rank {self.rank}{stage} "
            f"(sum of magnitudes {self.here:.17g}, on one device {self.one_device:.17g}). "
            f"Likely cause: {CAUSES[self.kind]}."
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hold what a comparison found; true when the runs are the same."""

    layout: Layout
    num_steps: int
    num_samples: int
    each_once: bool
    num_compared: int
    difference: Difference | None
    plain: str = ""
    plain_same: bool = True

    @property
    def same(self) -> bool:
        """Tell whether every bit agreed, and the plain loop where it was compared."""
        return self.difference is None and self.plain_same

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        once = "each once" if self.each_once else "some more than once (several epochs)"
        if self.difference is None:
            head = (
                f"{self.layout}: bit-identical to one device over {self.num_steps} steps; "
                f"{self.num_samples:,} samples, {once}; {self.num_compared:,} losses, gradients, weights, "
                "optimizer states and buffers compared"
            )
        else:
            head = f"{self.layout}: NOT the same as one device. {self.difference}"
        return head + (f"\n{self.plain}" if self.plain else "")


def verify(
    job: Job,
    layout: str | Layout = "auto",
    *,
    devices: int | None = None,
    steps: int = 3,
    threads: int = 1,
    plain: bool = True,
) -> Verdict:
    """Train ``steps`` steps on one device and under ``layout`` and compare everything bit for bit.

    Compares sample ids, losses, the gradient norm, every gradient, weight, optimizer state and buffer, on every
    rank; ``plain`` also compares one device with a plain loop on the whole batch in float64, dropout left out.
    The job's own model is not changed. Call it from one process (not under torchrun).
    """
    warm()
    chosen = choose_layout(job, layout, devices)
    if steps < 1:
        raise VerifyError(f"steps={steps}; compare at least 1 step.")
    one = run_ranks(lambda c: _prints(job, Layout(), steps, c), 1, threads=threads, name=job.name)[0]
    many = run_ranks(
        lambda c: _prints(job, chosen, steps, c), chosen.num_devices, threads=threads, name=job.name
    )
    reference: list[StepPrints] = one[0]
    text, fine = _plain(job, steps, threads) if plain else ("", True)
    ids = [i for step in reference for i in step.ids]
    return Verdict(
        layout=chosen,
        num_steps=len(reference),
        num_samples=sum(step.num_samples for step in reference),
        each_once=len(set(ids)) == len(ids),
        num_compared=sum(len(step.prints) for rank, _ in many for step in rank),
        difference=_first_difference(reference, many),
        plain=text,
        plain_same=fine,
    )


def _prints(job: Job, layout: Layout, steps: int, context: Any) -> tuple[list[StepPrints], dict[str, int]]:
    with Session(job, layout, device=context.device) as session:
        return take_prints(session, steps), stages_of(session)


def _first_difference(reference: list[StepPrints], many: list[Any]) -> Difference | None:
    for number, expected in enumerate(reference):
        for kind in KINDS:
            for rank, (steps, stages) in enumerate(many):
                found = _compare_kind(expected, steps[number] if number < len(steps) else None, kind)
                if found is not None:
                    name, one, here = found
                    parameter = name if kind != "optimizer state" else name.rpartition(".")[0]
                    return Difference(
                        step=number,
                        kind=kind,
                        name=name,
                        rank=rank,
                        stage=stages.get(parameter),
                        one_device=one,
                        here=here,
                    )
    return None


def _compare_kind(expected: StepPrints, found: StepPrints | None, kind: str) -> tuple[str, float, float] | None:
    if found is None:
        return "ids", 0.0, 0.0
    for (k, name), value in found.prints.items():
        if k != kind:
            continue
        other = expected.prints.get((k, name))
        if other is None or other.digest != value.digest:
            return name, float("nan") if other is None else other.size, value.size
    return None


def _plain(job: Job, steps: int, threads: int) -> tuple[str, bool]:
    if job.batch_norm == "microbatch":
        return "not compared with a plain loop: batch_norm='microbatch' is not what it computes", True
    loss = copy.deepcopy(job.loss).double() if isinstance(job.loss, nn.Module) else job.loss
    wide = job.with_fields(precision="float64", on_nonfinite="skip", loss=loss)
    try:
        worst, where = run_ranks(lambda c: _plain_rank(wide, steps, c), 1, threads=threads, name=job.name)[0]
    except MeshwiseError as error:  # a model that cannot run in float64, or data that cannot be one batch
        first = str(error).splitlines()[0]
        return f"not compared with a plain loop in float64: {first}", True
    head = "against a plain loop on the whole batch (float64, dropout left out):"
    if worst <= PLAIN_TOLERANCE:
        return f"{head} the same up to rounding, {worst:.1e}", True
    return (
        f"{head} {where} differs by {worst:.3g}; "
        "something in the model couples or counts samples, or draws random numbers, in a way that microbatches change",
        False,
    )


def _plain_rank(job: Job, steps: int, context: Any) -> tuple[float, str]:
    with NoDropout(), Session(job, Layout(), device=context.device) as session:
        return compare_plain(session, steps)
