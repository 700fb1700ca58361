"""The command line: ``meshwise train | verify | plan | compare | probe | export``."""

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
LayoutOption = Annotated[str, typer.Option(help='Like "dp=2,pp=2,schedule=1f1b"; auto: what a plan chooses.')]
MemoryOption = Annotated[str | None, typer.Option(help="What one device may use, like 2GiB; what is free by default.")]
JsonOption = Annotated[Path | None, typer.Option(help="Also write what was found to this file, as JSON.")]
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
    layout: Annotated[str, typer.Option(help='Like "dp=2,pp=2"; auto: one replica a device.')] = "auto",
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
def plan(
    file: FileArgument,
    devices: Devices = None,
    cluster: Annotated[
        str | None, typer.Option(help="Plan for a cluster elsewhere: like 8xH100 or 2x8xA100-80GB, or a JSON file.")
    ] = None,
    memory: MemoryOption = None,
    measure: Annotated[bool, typer.Option(help="Run the best few layouts for a few steps each.")] = True,
    threads: Threads = 1,
    json: JsonOption = None,
    changes: SetOption = None,
) -> None:
    """Choose the layout of the job in FILE and say why."""
    from .planning import plan as plan_job
    from .report.terminal import show_plan

    find_file(file)
    job = load_job(file, changes or [])
    made = plan_job(
        job, devices=devices, cluster=cluster, memory=memory, measure=measure, threads=threads, tell=_tell
    )
    show_plan(made)
    _write_json(json, made.to_json())


@app.command()
@_reported
def compare(
    file: FileArgument,
    devices: Devices = None,
    layouts: Annotated[
        list[str] | None, typer.Option("--layout", help="A layout to run (may be repeated); sensible ones by default.")
    ] = None,
    memory: MemoryOption = None,
    seconds: Annotated[float, typer.Option(help="How long one turn of a layout runs.")] = 1.0,
    turns: Annotated[int, typer.Option(help="Turns of each layout, interleaved.")] = 3,
    threads: Threads = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the page and pictures.")] = None,
    changes: SetOption = None,
) -> None:
    """Run the sensible layouts of the job in FILE and draw what they take: time, memory, and why."""
    from .comparing import compare as compare_job
    from .report.terminal import show_comparison

    find_file(file)
    job = load_job(file, changes or [])
    found = compare_job(
        job, devices, layouts=layouts or (), memory=memory, seconds=seconds, turns=turns, threads=threads, tell=_tell
    )
    show_comparison(found)
    _write_report(found, out or Path("comparisons") / job.name)


def _write_report(found: Any, folder: Path) -> None:
    """Write the page, its pictures where matplotlib is installed, and the values."""
    from .report.page import write_page
    from .report.pictures import write_pictures

    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "comparison.json", found.to_json())
    try:
        write_pictures(found, folder)
    except JobError as error:  # the page draws its own
        typer.echo(f"no PNG and SVG files: {error}", err=True)
    typer.echo(f"wrote {write_page(found, folder)}")


@app.command()
@_reported
def probe(
    devices: Devices = None,
    threads: Threads = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Only what planning needs, in a few seconds.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure this machine: computing, memory, and what ranks tell one another."""
    from .probing import describe
    from .probing import probe as probe_machine

    found = probe_machine(devices, quick=quick, threads=threads, tell=_tell)
    typer.echo(describe(found))
    if json is not None:
        from .hardware.files import write_cluster

        write_cluster(found, json)
        typer.echo(f"wrote {json}")


def _tell(text: str) -> None:
    """Say on a terminal what is being done."""
    if sys.stderr.isatty():
        typer.echo(f"{text} ...", err=True)


def _write_json(path: Path | None, facts: Any) -> None:
    import json

    if path is not None:
        path.write_text(json.dumps(facts, indent=2, default=str) + "\n")
        typer.echo(f"wrote {path}")


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
