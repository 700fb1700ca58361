"""The command ``python -m benchmarks.predictions``: predict every layout of every job, run it, and say how far off.

For each job, in turns: the units are timed and all layouts for 2 devices predicted, then every layout that fits is run.
Beside the median prediction stands what was measured: the median step, and the fullest rank's peak of resident memory
above its baseline.
*Regret* is how much slower the layout chosen by prediction alone (and the one chosen after the measuring step) is than
the best measured. With 4 ranks on fewer cores only memory is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import meshwise as mw
from meshwise.layout import Layout
from meshwise.planner.search import Found, consider
from meshwise.planning import Survey, choose, search_counts, survey
from meshwise.plans import Candidate
from meshwise.trials import Trial, Turn, run_trials

from .jobs import JOBS

OUT = Path(__file__).resolve().parent.parent / "out" / "predictions.json"
MIB = float(1 << 20)


@dataclass(kw_only=True)
class Line:
    """Hold one layout of one job: predicted and measured, seconds and bytes of the fullest rank."""

    job: str
    devices: int
    layout: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: float
    measured_bytes: float
    turns: list[float] = field(default_factory=list)  # the median step of each turn

    @property
    def time_error(self) -> float:
        """Give how far the prediction is above the measurement, as a share."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def noise(self) -> float:
        """Give how far the turns of this layout are from their median, as a share: what the machine's mood makes."""
        middle = statistics.median(self.turns) if self.turns else 1.0
        return statistics.median(abs(t / middle - 1) for t in self.turns) if len(self.turns) > 2 else 0.0

    @property
    def memory_error(self) -> float:
        """Give the same of memory."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(kw_only=True)
class Choice:
    """Hold what was chosen for a job, and by how much it is slower than the best measured layout."""

    job: str
    predicted: str
    regret: float
    after_measuring: str
    regret_after: float


@dataclass(kw_only=True)
class Report:
    """Hold all lines and choices."""

    lines: list[Line] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


def main() -> None:
    """Measure what the command line asks for."""
    args = _arguments()
    report = Report()
    for name in args.job or JOBS:
        job = JOBS[name]()
        surveyed = survey(job, devices=2, seconds=args.seconds)
        if not args.memory_only:
            _two(report, name, job, surveyed, args)
        if args.four:
            _four(report, name, job, surveyed)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(asdict(report), indent=1) + "\n")
    summarize(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--job", action="append", choices=list(JOBS))
    parser.add_argument("--seconds", type=float, default=1.0, help="least seconds of a turn, and of timing (default 1)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--four", action="store_true", help="also the memory of 4 ranks")
    parser.add_argument("--memory-only", action="store_true", help="only what --four adds")
    return parser.parse_args()


def kinds_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Give the best candidate of each dp, pp and schedule."""
    found: dict[tuple[int, int, str], Candidate] = {}
    for c in candidates:
        found.setdefault((c.layout.dp, c.layout.pp, c.layout.schedule if c.layout.pp > 1 else ""), c)
    return list(found.values())


def _two(report: Report, name: str, job: mw.Job, surveyed: Survey, args: argparse.Namespace) -> None:
    """Predict and run in turns: each turn times the units afresh and then runs every layout once."""
    found: Found = search_counts(surveyed, replace(surveyed.space, recompute=False))
    profile, workload = surveyed.task.profiles[0], surveyed.task.workloads[0]
    alone = consider(surveyed.task, profile, workload, Layout())
    candidates = [*kinds_of(found.candidates), *([alone] if isinstance(alone, Candidate) else [])]
    trials = [Trial(layout=c.layout, cuts=c.cuts or None) for c in candidates]
    predicted: list[list[float]] = [[c.estimate.seconds] for c in candidates]
    for number in range(args.turns):
        if number:
            surveyed = survey(job, devices=2, seconds=args.seconds)
            for seconds, candidate in zip(predicted, candidates, strict=True):
                seconds.append(_again(surveyed, candidate))
        run_trials(job, trials, turn=Turn(seconds=args.seconds, look=False), turns=1)
    medians = [statistics.median(seconds) for seconds in predicted]
    for candidate, trial, seconds in zip(candidates, trials, medians, strict=True):
        _add(report, name, 2, candidate, trial, seconds)
    triples = [
        (s, c, t)
        for s, c, t in zip(medians, candidates, trials, strict=True)
        if c.layout.num_devices == 2 and not t.error
    ]
    best = min(t.median for _, _, t in triples)
    first = min(triples, key=lambda x: x[0])
    taken = choose(surveyed, measure=True).chosen
    again = next((t for _, c, t in triples if c.layout == taken.layout), first[2])
    choice = Choice(
        job=name,
        predicted=str(first[1].layout),
        regret=first[2].median / best - 1,
        after_measuring=str(taken.layout),
        regret_after=again.median / best - 1,
    )
    report.choices.append(choice)
    print(
        f"  chosen by prediction {choice.predicted} ({choice.regret:+.1%} over the best), "
        f"after measuring {choice.after_measuring} ({choice.regret_after:+.1%})",
        flush=True,
    )


def _again(surveyed: Survey, candidate: Candidate) -> float:
    """Predict the same layout and cuts from another survey."""
    task = replace(surveyed.task, fixed_cuts=lambda stages: candidate.cuts or None, limit_bytes=None)
    found = consider(task, task.profiles[0], task.workloads[0], candidate.layout)
    assert isinstance(found, Candidate)
    return found.estimate.seconds


def _four(report: Report, name: str, job: mw.Job, surveyed: Survey) -> None:
    task = replace(surveyed.task, num_devices=4)
    wide = replace(surveyed, task=task, counts=(4,))
    candidates = kinds_of(search_counts(wide, replace(surveyed.space, recompute=False)).candidates)
    trials = [Trial(layout=c.layout, cuts=c.cuts or None) for c in candidates]
    run_trials(job, trials, turn=Turn(seconds=0.1, max_steps=5, look=False), turns=1)
    for candidate, trial in zip(candidates, trials, strict=True):
        _add(report, name, 4, candidate, trial)


def _add(
    report: Report, name: str, devices: int, candidate: Candidate, trial: Trial, seconds: float | None = None
) -> None:
    if trial.error or not trial.peaks:
        print(f"{name:18} {devices}  {candidate.layout!s:38} {trial.error or 'no peak is known here'}", flush=True)
        return
    line = Line(
        job=name,
        devices=devices,
        layout=str(candidate.layout),
        predicted_seconds=candidate.estimate.seconds if seconds is None else seconds,
        measured_seconds=trial.median,
        predicted_bytes=candidate.estimate.peak_bytes,
        measured_bytes=max(trial.peaks),
        turns=list(trial.medians),
    )
    report.lines.append(line)
    times = ""
    if devices == 2:
        figures = line.predicted_seconds * 1e3, line.measured_seconds * 1e3
        times = f"{figures[0]:9.2f} ms, measured {figures[1]:9.2f} ({line.time_error:+5.0%})"
    print(
        f"{name:18} {devices}  {line.layout:38} {times:48}"
        f"{line.predicted_bytes / MIB:7.0f} MiB, measured {line.measured_bytes / MIB:7.0f} ({line.memory_error:+5.0%})",
        flush=True,
    )


def summarize(report: Report) -> None:
    """Print medians and worst cases beside what they should be."""
    times = [abs(line.time_error) for line in report.lines if line.devices == 2]
    memory = [abs(line.memory_error) for line in report.lines]
    print()
    _row("step time", times, "10 % and 20 %")
    _row("noise of the turns", [line.noise for line in report.lines if line.devices == 2], "what the machine does")
    _row("peak memory", memory, "5 % and 10 %")
    _row("regret by prediction", [c.regret for c in report.choices], "1 % and 5 %")
    _row("regret after measuring", [c.regret_after for c in report.choices], "3 % at most")


def _row(name: str, errors: Sequence[float], target: str) -> None:
    if errors:
        print(
            f"{name:24} {len(errors):4} cases   median {statistics.median(errors):6.1%}   worst {max(errors):6.1%}   "
            f"(target: {target})"
        )


if __name__ == "__main__":
    main()
