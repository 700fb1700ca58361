"""Time a job's model where it will run: every unit by itself, and whole steps that say what units leave out.

::

    step of 1 microbatch   |begin|  F B  |update|
    step of 2              |begin|  F B  |  F B  |update|        their difference is a microbatch's true time
    units                  F0 F1 F2 ... B2 B1 B0                 how it divides among the units

All ranks of a host do this at the same time, since that is how they will compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..cost.profile import CellSeconds, Profile
from ..grid import microbatch_sizes
from ..hardware.limits import file_bytes, peak_bytes, reset_peak, resident_bytes
from ..job import Job
from ..layout import Layout
from ..parallel.transport import Mailroom, MemoryTransport
from ..tree import leaves
from .cells import Cell, StageState, Values
from .counted import count_model, unit_stages
from .engine import rebuild_output
from .losses import loss_of
from .step import StepBatch
from .worker import Worker, drive

MIN_ROUNDS, MAX_ROUNDS = 3, 40  # of each measurement; the first is thrown away


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Say how long to time: ``seconds`` for whole steps, and as much again for units."""

    seconds: float = 1.0


class Ranks(Protocol):
    """Say what the ranks that time together need of one another."""

    rank: int
    world_size: int

    def meet(self) -> None:
        """Wait for all ranks."""

    def tell(self, value: Any) -> list[Any]:
        """Give every rank's value to all."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Time on one device."""

    rank: int = 0
    world_size: int = 1

    def meet(self) -> None:
        """Wait for nobody."""

    def tell(self, value: Any) -> list[Any]:
        """Give the value back."""
        return [value]


def time_job(
    job: Job, device: torch.device, *, ranks: Ranks, fits: Callable[[Profile], bool], budget: Budget
) -> Profile:
    """Count and time the job's model at its own microbatch size. Every rank of the host calls it; all get the profile.

    ``fits`` says whether a whole step may be run here; where the model does not fit on one device, only units are.
    Rank 0 also times steps while the others wait, and measures the memory they take; the last rank does the counting,
    whose own memory would show in that.
    """
    memory = MemoryWatch()
    worker = Worker(job, Layout(), MemoryTransport(0, Mailroom()), device)
    memory.built()
    batch = next(iter(worker.batches(0)))
    m = batch.sizes.index(max(batch.sizes))
    data = batch.microbatch(m)
    last = ranks.rank == ranks.world_size - 1
    counted = count_model(job, worker.model, data, graph=worker.staged.graph) if last else None
    profile: Profile = ranks.tell(counted)[-1]
    load = _median(lambda: batch.load(m), 0.05)
    steps = StepTimer(worker, batch) if fits(profile) else None
    alone = together = None
    if steps is not None:
        alone = steps.run(budget.seconds / 2) if ranks.rank == 0 else None
        ranks.meet()
        together = steps.run(budget.seconds)
        if ranks.world_size > 1:
            profile = memory.seen(profile, steps.counts[1])
    units = UnitTimer(job, worker, data)
    ranks.meet()
    seconds = units.run(budget.seconds)
    if steps is None and ranks.world_size > 1:
        profile = replace(memory.seen(profile, 0), peak_bytes=None)
    timed = _settle(profile, seconds, together, load)
    if alone is not None and together is not None:
        timed = replace(timed, contention=max(1.0, together.microbatch / alone.microbatch))
    found: Profile = ranks.tell(timed if ranks.rank == 0 else None)[0]
    return found


class MemoryWatch:
    """Note what this process holds as a job is built and run, above what it held before."""

    def __init__(self) -> None:
        self.resets = reset_peak()
        self.began, self.files = resident_bytes(), file_bytes()
        self.after_build: tuple[int | None, int | None] = (None, None)

    def built(self) -> None:
        """Note that the model is built."""
        self.after_build = peak_bytes(), file_bytes()

    def seen(self, profile: Profile, num_microbatches: int) -> Profile:
        """Put what whole steps of so many microbatches took into the profile, where the system says it."""
        highest, files = peak_bytes(), file_bytes()
        built, build_files = self.after_build
        if not self.resets or highest is None or built is None or self.began is None:
            return profile
        if files is None or self.files is None or build_files is None:
            return profile
        return replace(
            profile,
            peak_bytes=float(highest - self.began),
            peak_microbatches=num_microbatches,
            file_bytes=float(files - self.files),
            build_bytes=float(built - self.began - (build_files - self.files)),
        )


def _median(run: Callable[[], Any], seconds: float) -> float:
    """Give the median time of a call, the first left out."""
    times = [_timed(run) for _ in _rounds(seconds)]
    return statistics.median(times[1:])


def _timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _rounds(seconds: float) -> Iterator[int]:
    """Count rounds until the time is up, at least MIN_ROUNDS and at most MAX_ROUNDS."""
    begun = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - begun > seconds:
            return
        yield number


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Hold medians: what one more microbatch costs a step, what a step costs beside them, and its update."""

    microbatch: float
    begin: float
    update: float
    accumulate: float
    rounds: int


@dataclass(kw_only=True)
class StepTimer:
    """Time whole optimizer steps of few and of more microbatches on this rank alone."""

    worker: Worker
    batch: StepBatch
    counts: tuple[int, int] = field(init=False)

    def __init__(self, worker: Worker, batch: StepBatch) -> None:
        self.worker, self.batch = worker, batch
        for group in worker.engine.optimizer.param_groups if worker.engine.optimizer is not None else ():
            if isinstance(group.get("lr"), float):  # the same few samples again and again would run away
                group["lr"] = 0.0
        few = 2 if worker.staged.coupled else 1
        self.counts = (min(few, len(batch.sizes)), min(few + 1, len(batch.sizes)))

    def run(self, seconds: float) -> StepSeconds:
        """Time steps in turns."""
        few: list[float] = []
        more: list[float] = []
        for _ in _rounds(seconds):
            few.append(_timed(lambda: self._step(self.counts[0])))
            if self.counts[1] > self.counts[0]:
                more.append(_timed(lambda: self._step(self.counts[1])))
        update = _median(self.worker.engine.fused.step, seconds / 10)
        accumulate = _median(self._accumulate, seconds / 20)
        once = statistics.median(few[1:])
        each = statistics.median(more[1:]) - once if more else 0.0
        begin = once - self.counts[0] * each - update if more else 0.0
        return StepSeconds(
            microbatch=each if more else once - update,
            begin=max(0.0, begin),
            update=update,
            accumulate=accumulate,
            rounds=len(few) - 1,
        )

    def _step(self, count: int) -> None:
        sizes = self.batch.sizes[:count]
        part = StepBatch(sizes=sizes, load=self.batch.load, ids=self.batch.ids[: sum(sizes)])
        drive(self.worker.step(part))

    def _accumulate(self) -> None:
        grads = [p.grad for p in self.worker.engine.parameters.values() if p.grad is not None and not p.grad.is_sparse]
        if grads:
            torch._foreach_add_(grads, grads)


class UnitTimer:
    """Time the forward and the backward (whole, and in its two halves) of every unit."""

    def __init__(self, job: Job, worker: Worker, data: Any) -> None:
        self.worker, self.data = worker, data
        self.staged = unit_stages(job, worker.staged.graph)
        self.inputs = worker.book.inputs(data)
        self.loss = loss_of(job)
        self.states = [StageState(worker.model, self.staged, s) for s in range(len(self.staged.stages))]
        self.batch = next(t.shape[0] for t in leaves(data) if isinstance(t, Tensor) and t.ndim)

    def run(self, seconds: float) -> list[CellSeconds]:
        """Give each unit's medians over rounds that run all units one after the other."""
        rounds: list[list[list[float]]] = []
        for number in _rounds(seconds):
            rounds.append(self._round(halves=number % 2 == 1))
        times = rounds[1:]
        whole = [r for k, r in enumerate(times, start=1) if k % 2 == 0] or times
        split = [r for k, r in enumerate(times, start=1) if k % 2 == 1] or times
        found = []
        for u in range(len(self.states)):
            forward = statistics.median(r[u][0] for r in times)
            backward = statistics.median(r[u][1] for r in whole)
            weight = min(statistics.median(r[u][2] for r in split), backward)
            found.append(
                CellSeconds(
                    forward=forward, backward=backward, backward_input=backward - weight, backward_weight=weight
                )
            )
        return found

    def _round(self, *, halves: bool) -> list[list[float]]:
        """Run all units forward and backward; give (forward, backward or its first half, second half) of each."""
        tensors: dict[Any, Tensor] = {}
        for state in self.states:
            state.begin(tensors)
        times = [[0.0, 0.0, 0.0] for _ in self.states]
        cells: list[Cell] = []
        for u, state in enumerate(self.states):
            begun = time.perf_counter()
            cells.append(self._forward(u, state, cells))
            times[u][0] = time.perf_counter() - begun
        grads: Values = ()
        for u in reversed(range(len(self.states))):
            cell = cells.pop()
            begun = time.perf_counter()
            if halves:
                taken = self.states[u].backward_input(cell, grads)
                middle = time.perf_counter()
                self.states[u].backward_weight(cell)
                times[u][2] = time.perf_counter() - middle
            else:
                taken, _ = self.states[u].backward(cell, grads)
            times[u][1] = time.perf_counter() - begun
            grads = taken
            for leaf in self.states[u].tensors.values():
                leaf.grad = None
        return times

    def _forward(self, u: int, state: StageState, cells: list[Cell]) -> Cell:
        engine = self.worker.engine
        before = cells[-1].gives if cells else ()
        takes = tuple(v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v for v in before)
        seed = engine.seeder(0) if self.staged.draws else None
        with self.worker.book.autocast():
            cell = state.forward(0, self.inputs, takes, batch=self.batch, seed=seed, rows=None, key=(0, u))
            if u == len(self.states) - 1:
                cell.loss = self.loss(
                    rebuild_output(self.staged, cell.gives, cell.whole, self.inputs), self.inputs.data
                )
        return cell


def _settle(profile: Profile, seconds: list[CellSeconds], whole: StepSeconds | None, load: float) -> Profile:
    """Put the times into the profile: units share what a microbatch takes in a whole step."""
    total = sum(s.forward + s.backward for s in seconds)
    if whole is None:
        factor, begin, update, accumulate, rounds = 1.0, 0.0, 0.0, 0.0, 0
    else:
        cells = max(whole.microbatch - load - whole.accumulate, 0.5 * total)
        factor = cells / total
        begin, update, accumulate, rounds = whole.begin, whole.update, whole.accumulate, whole.rounds
    units = tuple(
        replace(unit, seconds=_scaled(each, factor)) for unit, each in zip(profile.units, seconds, strict=True)
    )
    return replace(
        profile,
        units=units,
        load_seconds=load,
        begin_seconds=begin,
        update_seconds=update,
        accumulate_seconds=accumulate,
        num_steps=rounds,
    )


def _scaled(seconds: CellSeconds, factor: float) -> CellSeconds:
    return CellSeconds(
        forward=seconds.forward * factor,
        backward=seconds.backward * factor,
        backward_input=seconds.backward_input * factor,
        backward_weight=seconds.backward_weight * factor,
    )


def microbatches_of(job: Job) -> tuple[int, ...]:
    """Give the microbatches of a whole step of the job."""
    return microbatch_sizes(job.batch_size, job.microbatch)
