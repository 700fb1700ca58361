"""What a person sees while a run goes on: a bar for the steps, a line for each epoch."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..events import EpochEnded, Event, RunEnded, RunStarted, StepEnded


class Progress:
    """Show the events of a run on the terminal; a listener and a context manager."""

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self.enabled = enabled
        self.console = console or Console()
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.task: Any = None
        self.first = 0
        self.num_epochs = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if not self.enabled:
            return
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, StepEnded):
            self._step(event)
        elif isinstance(event, EpochEnded):
            self._epoch(event)
        elif isinstance(event, RunEnded):
            self._end(event)

    def tell(self, text: str) -> None:
        """Show what is done before the run starts."""
        if self.enabled and self.console.is_terminal:
            self.console.print(f"  {escape(text)} ...", style="dim", highlight=False, soft_wrap=True)

    def _start(self, event: RunStarted) -> None:
        devices = f"{event.num_devices} device{'s' if event.num_devices != 1 else ''}"
        self.console.print(
            f"[bold]meshwise[/bold]: layout {event.layout} on {devices}; run folder {escape(event.folder)}",
            soft_wrap=True,
        )
        for note in event.notes:
            self.console.print(f"  {escape(note)}", style="dim", highlight=False, soft_wrap=True)
        for warning in event.warnings:
            self.console.print(f"  warning: {escape(warning)}", style="yellow", highlight=False, soft_wrap=True)
        for offer in event.offers:
            self.console.print(f"  faster: {escape(offer)}", style="dim", highlight=False, soft_wrap=True)
        self.num_epochs = event.num_epochs
        self.task = self.bar.add_task("training", total=event.num_steps or None, loss="")
        if self.console.is_terminal:
            self.bar.start()

    def _step(self, event: StepEnded) -> None:
        if self.task is None:
            return
        if not self.bar.tasks[0].completed:
            self.first = event.step
        text = f"loss {event.loss:.4f}"
        self.bar.update(
            self.task,
            completed=event.step - self.first + 1,
            loss=text,
            description=f"epoch {event.epoch + 1}",
        )

    def _epoch(self, event: EpochEnded) -> None:
        parts = [f"epoch {event.epoch + 1}/{self.num_epochs}  loss {event.loss:.4f}"]
        for name, value in event.metrics.items():
            parts.append(f"eval loss {value:.4f}" if name == "loss" else f"{name} {value:.4f}")
        if event.num_evaluated:
            parts.append(f"({event.num_evaluated} test samples, each once)")
        if event.num_skipped:
            parts.append(f"{event.num_skipped} step{'s' if event.num_skipped > 1 else ''} skipped (loss not finite)")
        parts.append(f"{event.num_samples} samples, {event.seconds:.1f} s")
        self.console.print("  ".join(parts), highlight=False, soft_wrap=True)

    def _end(self, event: RunEnded) -> None:
        self.bar.stop()
        self.console.print(f"done: {event.num_steps} steps in {event.seconds:.1f} s")
