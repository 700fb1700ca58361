"""The command line: ``meshwise train | verify | export``."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import JobError, MeshwiseError
from .job import Job

app = typer.Typer(
    name="meshwise",
    help="Train one PyTorch job on any mesh of devices, with the same result, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE[:NAME]", help="Python file, and the job in it (default: job).")
]
Devices = Annotated[int | None, typer.Option(help="Number of devices; all of this machine by default.")]
LayoutOption = Annotated[str, typer.Option(help='Like "dp=2,pp=2,schedule=1f1b"; auto: one replica a device.')]
Threads = Annotated[int, typer.Option(help="Threads of a CPU device.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job.")]


def _reported(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a user can cause into a message and an exit code: 2, or 130 for an interrupt."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except MeshwiseError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted; all ranks are gone", err=True)
            raise typer.Exit(130) from None

    return run


@app.callback()
def _root() -> None:
    """Train one PyTorch job on any mesh of devices, with the same result, bit for bit."""


@app.command()
@_reported
def train(
    file: FileArgument,
    devices: Devices = None,
    layout: LayoutOption = "auto",
    epochs: Annotated[int | None, typer.Option(help="Epochs in all, instead of the job's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run or checkpoint to go on from, under any layout.")] = None,
    threads: Threads = 1,
    changes: SetOption = None,
) -> None:
    """Train the job in FILE."""
    from .training import train as train_job
    from .training import warm_for

    find_file(file)
    warm_for(layout, devices)  # while the job, and torch with it, is loaded here
    job = load_job(file, changes or [])
    result = train_job(
        job, devices=devices, layout=layout, epochs=epochs, steps=steps, run=run, resume=resume, threads=threads
    )
    typer.echo(str(result))


@app.command()
@_reported
def verify(
    file: FileArgument,
    devices: Devices = None,
    layout: LayoutOption = "auto",
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 3,
    threads: Threads = 1,
    plain: Annotated[bool, typer.Option(help="Also compare with a plain float64 loop.")] = True,
    changes: SetOption = None,
) -> None:
    """Compare the job under a layout with one device, bit for bit. Exits 1 when they differ."""
    from .launch.forkserver import warm

    find_file(file)
    warm()  # it compares in ranks of its own, however many
    job = load_job(file, changes or [])
    from .verification import verify as verify_job

    verdict = verify_job(job, layout, devices=devices, steps=steps, threads=threads, plain=plain)
    typer.echo(str(verdict))
    if not verdict:
        raise typer.Exit(1)


@app.command()
@_reported
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a checkpoint.")],
    to: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
) -> None:
    """Write a run's weights under the model's own names."""
    from .checkpoint.store import export_weights, latest
    from .errors import CheckpointError

    folder = latest(run / "checkpoints") if (run / "checkpoints").is_dir() else run
    if folder is None:
        raise CheckpointError(f"{run} holds no checkpoint.")
    export_weights(folder, to)
    typer.echo(f"wrote {to}")


def load_job(text: str, changes: list[str]) -> Job:
    """Load the job that ``FILE[:NAME]`` names (a Job or a function that returns one) and change its fields.

    Raises JobError when the file, the name or a field is not there.
    """
    path, name = find_file(text)
    module = _load_module(path)
    found = getattr(module, name or "job", None)
    if found is None:
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
        jobs = [n for n, v in vars(module).items() if isinstance(v, Job)]
        functions = [n for n, v in own.items() if callable(v) and not isinstance(v, type) and not n.startswith("_")]
        have = ", ".join(sorted({*jobs, *functions})) or "no Job and no function"
        raise JobError(f"{path} has no {name or 'job'!r}; it has: {have}. Name one as FILE:NAME.")
    job = found() if callable(found) and not isinstance(found, Job) else found
    if not isinstance(job, Job):
        what = type(job).__name__
        raise JobError(f"{text}: {name or 'job'} is a {what}, not a meshwise.Job or a function that returns one.")
    fields = dict(parse_change(change) for change in changes)
    if job.name == "job":
        fields.setdefault("name", path.stem)
    return job.with_fields(**fields) if fields else job


def parse_change(text: str) -> tuple[str, Any]:
    """Read one ``field=value`` (a Python literal, or plain text)."""
    key, equals, value = text.partition("=")
    if not equals:
        raise JobError(f"--set {text!r}: write FIELD=VALUE.")
    try:
        return key.strip(), ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key.strip(), value


def find_file(text: str) -> tuple[Path, str]:
    """Read ``FILE[:NAME]`` without loading anything. Raises JobError when there is no such file."""
    file, _, name = text.partition(":") if not Path(text).exists() else (text, "", "")
    path = Path(file)
    if not path.is_file():
        raise JobError(f"there is no file {str(path)!r}.")
    return path, name


def _load_module(path: Path) -> Any:
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the exit code is 0 only when all of it worked."""
    app(args=arguments)
