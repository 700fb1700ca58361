"""The facts of a run that a resume must keep, and how two runs differ in them."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.errors import CheckpointError

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Hold what fixes the bits of a run, and where it was written; no word about devices or layout.

    ``batch_size`` and ``microbatch_sizes`` are in samples, ``created`` is ISO 8601 in UTC.
    """

    format_version: int = FORMAT_VERSION
    meshwise_version: str
    torch_version: str
    python_version: str
    job: str
    seed: int
    batch_size: int
    microbatch_sizes: tuple[int, ...]
    slots: int
    num_parameters: int
    created: str

    @classmethod
    def of_this_process(
        cls,
        *,
        job: str,
        seed: int,
        batch_size: int,
        microbatch_sizes: tuple[int, ...],
        slots: int,
        num_parameters: int,
    ) -> Manifest:
        """Describe a job as this process would run it, now."""
        return cls(
            meshwise_version=_version("meshwise"),
            torch_version=_version("torch"),
            python_version=platform.python_version(),
            job=job,
            seed=seed,
            batch_size=batch_size,
            microbatch_sizes=tuple(microbatch_sizes),
            slots=slots,
            num_parameters=num_parameters,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    def to_json(self) -> dict[str, Any]:
        """Give the manifest as plain JSON values."""
        return dataclasses.asdict(self) | {"microbatch_sizes": list(self.microbatch_sizes)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Manifest:
        """Read a manifest back.

        Raises:
            CheckpointError: it is of another format version, or a field is missing or unknown.
        """
        check_format(values.get("format_version"), str(values.get("meshwise_version")))
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(values):
            raise CheckpointError(
                f"the manifest lacks {sorted(names - set(values))} and has unknown "
                f"{sorted(set(values) - names)}; it was edited, or written by another program."
            )
        return cls(**{**values, "microbatch_sizes": tuple(values["microbatch_sizes"])})

    def __str__(self) -> str:
        return (
            f"{self.job}: seed {self.seed}, batch {self.batch_size} as {list(self.microbatch_sizes)}, "
            f"{self.num_parameters} parameters, meshwise {self.meshwise_version}, torch {self.torch_version}"
        )


def check_format(version: object, written_by: str) -> None:
    """Refuse a format version that this meshwise does not read.

    Raises:
        CheckpointError: it names both versions.
    """
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version} (written by meshwise {written_by}), and this "
            f"meshwise ({_version('meshwise')}) reads version {FORMAT_VERSION}; use the one that wrote it."
        )


PINNED = ("seed", "batch_size", "microbatch_sizes", "slots", "num_parameters")  # a run keeps these to its end


def differences(old: Manifest, new: Manifest, names: Sequence[str] | None = None) -> list[str]:
    """Say, one sentence for each, how the job now differs from the one that wrote a checkpoint.

    Empty when a resumed run gives the bits of an unbroken one. ``created`` does not count. ``names`` are the
    fields to compare (all unless given).
    """
    if names is None:
        names = [field.name for field in dataclasses.fields(Manifest) if field.name != "created"]
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in names)
    return [
        f"{name} was {was!r} when the run was saved and is {now!r} now."
        for name, was, now in pairs
        if was != now
    ]


def _version(package: str) -> str:
    """Give a package's version without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
