"""The training loop of one rank: steps, epochs, evaluation, checkpoints, events."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .events import EpochEnded, Event, RunEnded, RunStarted, StepEnded

if TYPE_CHECKING:
    from .session import Session

KEPT_CHECKPOINTS = 2
SHOW_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Span:
    """Say how far to train: ``epochs`` in all, and at most ``steps`` more optimizer steps (None: no limit)."""

    epochs: int
    steps: int | None = None


class Reporter:
    """Pass events on: all to the run's record, steps to the display at most ten times a second."""

    def __init__(self, record: Callable[[Event], None], show: Callable[[Event], None]) -> None:
        self.record, self.show = record, show
        self.shown = 0.0

    def __call__(self, event: Event) -> None:
        """Pass one event on."""
        self.record(event)
        if isinstance(event, StepEnded) and event.time - self.shown < SHOW_SECONDS:
            return
        self.shown = event.time
        self.show(event)


def run_training(
    session: Session, span: Span, report: Callable[[Event], None], folder: Path
) -> dict[str, Any]:
    """Train from where the session stands and give the history. Every rank calls it; rank 0 reports."""
    start, first_step = time.monotonic(), session.step_index
    per_epoch = session.worker.steps_per_epoch()
    report(_run_started(session, span, folder, per_epoch))
    history: list[EpochEnded] = []
    epoch, within = session.position
    left = span.steps
    while epoch < span.epochs and (left is None or left > 0):
        before = session.step_index
        ended = _run_epoch(session, epoch, within, left, report)
        left = None if left is None else left - (session.step_index - before)
        history.append(ended)
        report(ended)
        save_checkpoint_of(session, folder, epoch)
        if session.step_index == before and left is not None:
            break
        epoch, within = epoch + 1, 0
    report(RunEnded(num_steps=session.step_index - first_step, seconds=time.monotonic() - start))
    return {
        "history": history,
        "num_steps": session.step_index - first_step,
        "notes": session.notes,
        "folder": folder,
        "layout": session.layout,
    }


def _run_started(session: Session, span: Span, folder: Path, per_epoch: int | None) -> RunStarted:
    steps = (per_epoch or 0) * span.epochs - session.step_index
    return RunStarted(
        layout=str(session.layout),
        num_devices=session.layout.num_devices,
        num_steps=max(0, steps if span.steps is None else min(steps, span.steps)),
        num_epochs=span.epochs,
        folder=str(folder),
        notes=(batch_note(session), *session.notes),
        warnings=tuple(session.warnings),
        offers=tuple(session.offers),
    )


def batch_note(session: Session) -> str:
    """Say what a batch is under the layout."""
    from .grid import microbatch_sizes

    job, layout = session.job, session.layout
    sizes = microbatch_sizes(job.batch_size, job.microbatch)
    shape = (
        f"{len(sizes)} x {sizes[0]}"
        if len(set(sizes)) == 1
        else " + ".join(map(str, sizes[:6])) + (" ..." if len(sizes) > 6 else "")
    )
    per = session.worker.steps_per_epoch()
    share = session.worker.engine.mesh.dp
    steps = f", {per} steps an epoch" if per else ""
    shared = f"shared by {share} replica{'s' if share > 1 else ''}"
    return f"a step is {job.batch_size} samples on all devices together ({shape}), {shared}{steps}; layout {layout}"


def _run_epoch(
    session: Session, epoch: int, within: int, left: int | None, report: Callable[[Event], None]
) -> EpochEnded:
    start = last = time.monotonic()
    total, samples, skipped = 0.0, 0, 0
    for number, batch in enumerate(session.worker.batches(epoch, within)):
        if left is not None and number >= left:
            break
        result = session.step(batch)
        now = time.monotonic()
        skipped += result.skipped
        if not result.skipped:
            total += result.loss * (result.num_samples if session.worker.weigher.kind != "sum" else 1)
            samples += result.num_samples
        report(
            StepEnded(
                step=result.step,
                epoch=epoch,
                loss=result.loss,
                grad_norm=result.grad_norm,
                num_samples=result.num_samples,
                seconds=now - last,
                skipped=result.skipped,
            )
        )
        last = now
    metrics = session.evaluate()
    evaluated = int(metrics.pop("num_samples", 0))
    return EpochEnded(
        epoch=epoch,
        loss=total / max(1, samples),
        num_samples=samples,
        seconds=time.monotonic() - start,
        metrics=metrics,
        num_evaluated=evaluated,
        num_skipped=skipped,
    )


def save_checkpoint_of(session: Session, folder: Path, epoch: int) -> None:
    """Save the state of the run and forget all but the newest checkpoints."""
    place = folder / "checkpoints"
    if session.rank == 0:
        place.mkdir(parents=True, exist_ok=True)
    session.save(place / f"step-{session.step_index:08d}", epoch=epoch)
    if session.rank == 0:
        for old in sorted(place.glob("step-*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
