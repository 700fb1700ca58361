"""What can happen in a run, as values; listeners get them; one line of JSON each in the run's record."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """Stand above every event; ``time`` is seconds since the epoch (1970)."""

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Say that a run starts: its layout, its devices, and what was found out about the job."""

    layout: str
    num_devices: int
    num_steps: int
    num_epochs: int
    folder: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()  # faster settings that are the user's to choose


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """Say what an optimizer step gave."""

    step: int
    epoch: int
    loss: float
    grad_norm: float | None
    num_samples: int
    seconds: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """Say what an epoch gave: the mean loss over its samples, and the metrics where they were evaluated."""

    epoch: int
    loss: float
    num_samples: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    num_evaluated: int = 0
    num_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Say that a run ended."""

    num_steps: int
    seconds: float


Listener = Callable[[Event], None]
Tell = Callable[[str], None]  # hears what is done before a run starts


def silent(text: str) -> None:
    """Tell nobody."""


class Recorder:
    """Write each event as a line of JSON to ``events.jsonl`` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "events.jsonl").open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        """Write one event."""
        record: dict[str, Any] = {"event": type(event).__name__, **dataclasses.asdict(event)}
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self.file.close()
