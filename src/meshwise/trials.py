"""Run layouts for a few steps each: how long a step takes, what each rank does when, and its peak of memory.

Layouts are run in turns, each turn in fresh ranks, so that a machine's moods meet them all alike and no layout inherits
another's memory.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import MeshwiseError
from .events import Tell, silent
from .hardware.limits import peak_bytes, reset_peak, resident_bytes
from .job import Job
from .layout import Layout
from .schedule.actions import Action

if TYPE_CHECKING:
    from .session import Session

Span = tuple[Action | None, float, float]  # None: bringing data; seconds of one clock that all ranks of a host share
WARM_STEPS = 4  # first steps take fresh memory and choose kernels


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Say how long one turn of a layout may run: at least ``min_steps`` timed steps, then to the end of ``seconds``."""

    seconds: float = 1.0
    min_steps: int = 3
    max_steps: int = 200
    look: bool = True  # note what each rank does in one more step


@dataclass(frozen=True, kw_only=True)
class RankTrial:
    """Hold what one rank saw in a turn; ``peak`` is resident memory above what the rank began with, in bytes."""

    seconds: tuple[float, ...]
    spans: tuple[Span, ...] = ()
    peak: float | None = None


@dataclass(kw_only=True)
class Trial:
    """Hold what all turns of one layout gave: its steps' seconds, the last turn's spans, the highest peak a rank."""

    layout: Layout
    cuts: tuple[int, ...] | None = None
    seconds: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # of each turn
    spans: list[tuple[Span, ...]] = field(default_factory=list)  # of each rank
    peaks: list[float] = field(default_factory=list)  # of each rank
    error: str = ""

    @property
    def median(self) -> float:
        """Give the median of the turns' medians, infinite where nothing ran."""
        return statistics.median(self.medians) if self.medians else float("inf")

    def add(self, ranks: Sequence[RankTrial]) -> None:
        """Take in one turn: a step takes as long as on its slowest rank."""
        steps = [max(times) for times in zip(*(r.seconds for r in ranks), strict=True)]
        self.seconds += steps
        self.medians.append(statistics.median(steps))
        self.spans = [r.spans for r in ranks]
        known = [r.peak for r in ranks if r.peak is not None]
        if len(known) == len(ranks):
            self.peaks = [max(a, b) for a, b in zip(self.peaks or [0.0] * len(known), known, strict=True)]


def run_trials(
    job: Job,
    trials: Sequence[Trial],
    *,
    turn: Turn,
    turns: int = 2,
    threads: int = 1,
    tell: Tell = silent,
) -> None:
    """Run each layout ``turns`` times, interleaved, and put what was found into the trials.

    A layout that fails keeps its error and is left out of later turns. The job's own model is not changed.
    """
    from .launch.local import run_ranks

    job = job.with_fields(on_nonfinite="skip")  # what is measured is time
    for number in range(turns):
        for trial in trials if number % 2 == 0 else list(trials)[::-1]:
            if trial.error:
                continue
            tell(f"running {trial.layout} (turn {number + 1} of {turns})")
            try:
                ranks = run_ranks(
                    _rank_function(job, trial, turn), trial.layout.num_devices, threads=threads, name=job.name
                )
            except MeshwiseError as error:
                trial.error = str(error).splitlines()[0]
                continue
            trial.add(ranks)


def _rank_function(job: Job, trial: Trial, turn: Turn) -> Callable[[Any], RankTrial]:
    layout, cuts = trial.layout, trial.cuts
    return lambda context: try_layout(job, layout, cuts, turn, context.device)


def try_layout(job: Job, layout: Layout, cuts: Sequence[int] | None, turn: Turn, device: Any) -> RankTrial:
    """Run one turn of a layout on this rank. Every rank calls it."""
    from .session import Session

    began = resident_bytes()
    known = reset_peak() and began is not None
    with Session(job, layout, device=device, cuts=cuts) as session:
        seconds = _run_steps(session, turn)
        highest = peak_bytes()
        spans = _look(session) if turn.look else ()
    peak = float(highest - began) if known and highest is not None and began is not None else None
    return RankTrial(seconds=tuple(seconds), spans=spans, peak=peak)


def _batches(session: Session) -> Any:
    """Give the job's batches again and again, whatever its epochs; none that is smaller than a whole one."""
    epoch = 0
    while True:
        found = False
        for batch in session.worker.batches(epoch):
            if batch.num_samples == session.job.batch_size or epoch == 0:
                found = True
                yield batch
        epoch += 1
        if not found:
            return


def _run_steps(session: Session, turn: Turn) -> list[float]:
    """Time steps; rank 0 says when it is enough, so that all ranks stop together."""
    batches = _batches(session)
    for _ in range(WARM_STEPS):
        session.step(next(batches))
    session._meet()
    times: list[float] = []
    begun = last = time.perf_counter()
    stop = turn.max_steps
    while len(times) < stop:
        session.step(next(batches))
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if stop == turn.max_steps and len(times) >= turn.min_steps:
            each = (now - begun) / len(times)
            stop = session.agree(max(len(times), min(turn.max_steps, int(turn.seconds / each))))
            last = time.perf_counter()
    return times


def _look(session: Session) -> tuple[Span, ...]:
    """Run two more steps and note what this rank does in the second."""
    engine, batches = session.worker.engine, _batches(session)
    spans: list[Span] = []
    for _ in range(2):
        batch = next(batches)
        loads: list[Span] = []
        batch.load = _noted_load(batch.load, loads)
        session._meet()
        engine.spans = []
        session.step(batch)
        spans = [*loads, *engine.spans]
    engine.spans = None
    return tuple(spans)


def _noted_load(load: Callable[[int], Any], loads: list[Span]) -> Callable[[int], Any]:
    def noted(m: int) -> Any:
        begun = time.perf_counter()
        data = load(m)
        loads.append((None, begun, time.perf_counter()))
        return data

    return noted


def with_own_model(job: Job) -> Job:
    """Give the job a copy of its model where that is a module, so that trials in this process leave it alone."""
    from torch import nn

    return job.with_fields(model=copy.deepcopy(job.model)) if isinstance(job.model, nn.Module) else job
