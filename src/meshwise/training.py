"""Train a job: choose the layout, start the ranks (or join torchrun's), report, and give the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .epochs import Reporter, Span, run_training
from .errors import CheckpointError, JobError, LayoutError
from .events import EpochEnded, Event, Recorder
from .job import Job
from .launch.forkserver import warm_ahead
from .layout import Layout, is_auto

if TYPE_CHECKING:  # the rest is imported while ranks' own imports are on their way, see warm_for
    import torch

    from .session import Session
    from .settling import Settled


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Hold what a training run gave: one entry an epoch, and where the run's folder is."""

    layout: Layout
    folder: Path
    history: tuple[EpochEnded, ...]
    num_steps: int
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def loss(self) -> float:
        """Give the mean loss of the last epoch."""
        return self.history[-1].loss if self.history else float("nan")

    @property
    def metrics(self) -> dict[str, float]:
        """Give the metrics of the last evaluation."""
        return self.history[-1].metrics if self.history else {}

    def weights(self) -> dict[str, torch.Tensor]:
        """Load the trained weights and buffers, under the model's own names."""
        from .checkpoint.store import latest, load_checkpoint

        found = latest(self.folder / "checkpoints")
        if found is None:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint: the run ended before its first epoch did."
            )
        return dict(load_checkpoint(found).tensors)

    def __str__(self) -> str:
        shown = {("eval loss" if name == "loss" else name): value for name, value in self.metrics.items()}
        metrics = "".join(f", {name} {value:.4f}" for name, value in shown.items())
        return f"{self.num_steps} steps under {self.layout}: loss {self.loss:.6f}{metrics}; run folder {self.folder}"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    job: Job
    layout: str | Layout  # settled, but under torchrun, where the ranks settle it
    span: Span
    folder: Path
    resume: Path | None
    threads: int
    settled: Settled | None = None


def train(
    job: Job,
    *,
    devices: int | None = None,
    layout: str | Layout = "auto",
    run: str | Path | None = None,
    resume: str | Path | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    threads: int = 1,
    progress: bool = True,
    listeners: Sequence[Callable[[Event], None]] = (),
) -> TrainResult:
    """Train ``job`` and return what came of it.

    Starts one rank a device of the layout; "auto" plans it (see :func:`meshwise.plan`) for ``devices``, or for as many
    of this machine's as make a step fastest. Under ``torchrun`` every rank calls it and joins. ``run`` is the run's
    folder (default ``runs/NAME-TIME``); ``resume`` a run or checkpoint to go on from, under any layout. ``steps``
    limits the optimizer steps. ``threads`` is the number of threads of a CPU device. ``listeners`` get the events of
    rank 0. Raises LayoutError, JobError or CaptureError before the first step; RankError with the first failing
    rank's own error after it.
    """
    warm_for(layout, devices)
    from .launch.environment import detect
    from .report.progress import Progress
    from .settling import settle

    environment = detect()
    joined = environment.world_size > 1
    show, settled = Progress(enabled=progress and environment.rank == 0), None
    if not joined:
        count = steps or num_steps_of(job, epochs)
        settled = settle(job, layout, devices, threads=threads, steps=count, tell=show.tell)
        job, layout = settled.job, settled.layout
    plan = _Plan(
        job=job,
        layout=layout,
        settled=settled,
        span=Span(epochs=job.epochs if epochs is None else epochs, steps=steps),
        folder=_run_folder(job, run, resume),
        resume=None if resume is None else Path(resume).resolve(),
        threads=threads,
    )

    def hear(event: Any) -> None:
        show(event)
        for listener in listeners:
            listener(event)

    start = time.monotonic()
    with show:
        found = _run(plan, joined, hear)
    return TrainResult(
        layout=found["layout"],
        folder=found["folder"],
        history=tuple(found["history"]),
        num_steps=found["num_steps"],
        seconds=time.monotonic() - start,
        notes=tuple(found["notes"]),
    )


def num_steps_of(job: Job, epochs: int | None) -> int | None:
    """Count the optimizer steps of a run, None where its data cannot be counted."""
    from .data.loader import MicrobatchLoader
    from .data.order import num_steps

    count = MicrobatchLoader(job.train_data, seed=job.seed, num_workers=None).num_samples
    each = None if count is None else num_steps(count, job.batch_size, job.drop_last)
    return None if each is None else each * (job.epochs if epochs is None else epochs)


def warm_for(layout: str | Layout, devices: int | None) -> None:
    """Let what ranks are forked from start before anything slow is done here, if there will be ranks."""
    if not is_auto(layout):
        try:
            devices = Layout.parse(layout, devices=devices).num_devices
        except LayoutError:  # told once the job is known
            return
    warm_ahead(devices)


def _run(plan: _Plan, joined: bool, hear: Callable[[Event], None]) -> dict[str, Any]:
    import torch.distributed as dist

    from .launch.local import run_ranks
    from .session import Session

    if joined:
        with Session(plan.job, plan.layout, threads=plan.threads) as session:
            plan = replace(plan, folder=session.agree(plan.folder))
            return train_rank(session, plan, hear if session.rank == 0 else _ignore)
    settled = plan.settled
    assert settled is not None
    if settled.layout.num_devices == 1 and not dist.is_initialized():
        with Session(plan.job, plan.layout, devices=1, threads=plan.threads) as session:
            return train_rank(session, plan, hear)
    results = run_ranks(
        lambda context: _rank_main(plan, context),
        settled.layout.num_devices,
        threads=plan.threads,
        on_event=hear,
        name=plan.job.name,
    )
    found: dict[str, Any] = results[0]
    return found


def _rank_main(plan: _Plan, context: Any) -> dict[str, Any] | None:
    from .session import Session

    cuts = plan.settled.cuts if plan.settled is not None else None
    with Session(plan.job, plan.layout, device=context.device, cuts=cuts) as session:
        emit = context.emit if session.rank == 0 else _ignore
        found = train_rank(session, plan, emit)
        return found if session.rank == 0 else None


def train_rank(session: Session, plan: Any, hear: Callable[[Event], None]) -> dict[str, Any]:
    """Run the training of one rank; rank 0 writes the run's folder."""
    if plan.settled is not None and plan.settled.made is not None:
        session.plan = plan.settled.made
        session.notes = [*plan.settled.notes, *session.notes]
    if plan.resume is not None:
        session.load(plan.resume)
    if session.rank != 0:
        return run_training(session, plan.span, _ignore, plan.folder)
    _write_facts(session, plan)
    recorder = Recorder(plan.folder)
    try:
        return run_training(session, plan.span, Reporter(recorder, hear), plan.folder)
    finally:
        recorder.close()


def _write_facts(session: Session, plan: Any) -> None:
    plan.folder.mkdir(parents=True, exist_ok=True)
    (plan.folder / "manifest.json").write_text(json.dumps(session.manifest().to_json(), indent=2) + "\n")
    staged = session.worker.staged
    facts = {
        "layout": str(session.layout),
        "stages": [
            [u.key[0] for u in staged.units if staged.stage_of_unit(u.index) == s]
            for s in range(len(staged.stages))
        ],
        "plan": None if session.plan is None else session.plan.to_json(),
        "notes": session.notes,
        "warnings": session.warnings,
        "offers": session.offers,
    }
    (plan.folder / "plan.json").write_text(json.dumps(facts, indent=2) + "\n")


def _ignore(event: Event) -> None:
    return None


def _run_folder(job: Job, run: str | Path | None, resume: str | Path | None) -> Path:
    if run is not None:
        folder = Path(run)
    elif resume is not None and (Path(resume) / "checkpoints").is_dir():
        folder = Path(resume)
    else:
        folder = Path("runs") / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if folder.exists() and not folder.is_dir():
        raise JobError(f"run={str(folder)!r} is a file; name a folder.")
    return folder.resolve()
