"""Planning as a user meets it: plan, compare, probe, layout="auto" and microbatch_size="auto"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

import meshwise as mw
from meshwise.cli import app
from meshwise.errors import JobError, LayoutError
from meshwise.launch.local import run_ranks
from meshwise.layout import Layout
from meshwise.planning import survey
from meshwise.runtime.counted import count_model
from meshwise.runtime.elsewhere import profiles_elsewhere
from meshwise.trials import Trial, Turn, run_trials

DIGITS = Path(__file__).parents[1] / "examples" / "digits_mlp.py"
LLAMA = Path(__file__).parents[1] / "examples" / "llama.py"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep probes of these tests out of the user's folder."""
    monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def job(**fields: object) -> mw.Job:
    data = TensorDataset(torch.randn(64, 32), torch.randint(0, 4, (64,)))
    settings: dict[str, object] = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "train_data": data,
        "batch_size": 32,
    }
    return mw.Job(**(settings | fields))  # type: ignore[arg-type]


# ---- plan --------------------------------------------------------------------------------------------------


def test_a_plan_for_two_devices_runs_the_best_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints advice, what it measured, and writes all of it as JSON."""
    monkeypatch.setattr("meshwise.planning.NUM_MEASURED", 2)
    monkeypatch.setattr("meshwise.planning.SLOW_STEP", 0.0)  # fewer turns
    found = run("plan", DIGITS, "--devices", "2", "--json", tmp_path / "plan.json")
    assert found.exit_code == 0, found.output
    assert "Take " in found.output and "How sure:" in found.output and "a step measured" in found.output
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["num_devices"] == 2 and facts["chosen"]["measured_seconds"] > 0
    assert mw.Plan.from_json(facts).layout.num_devices == 2


def test_a_limit_that_nothing_fits_names_every_layout() -> None:
    """The error lists the layouts with what they need, and exits with 2."""
    found = run("plan", DIGITS, "--devices", "2", "--memory", "1MiB", "--no-measure")
    assert found.exit_code == 2
    assert "no layout of 2 devices fits" in found.output
    assert "dp=2:" in found.output and "of 1.00 MiB" in found.output


def test_the_model_of_the_job_is_left_alone() -> None:
    """Planning a job that holds a module changes neither its weights nor its gradients."""
    model = network()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    made = mw.plan(job(model=model), devices=2, measure=False)
    assert made.layout.num_devices == 2
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


def test_a_plan_for_a_cluster_elsewhere_needs_no_device(tmp_path: Path) -> None:
    """A named cluster is planned from counts alone; tp and zero may be chosen there."""
    found = run("plan", f"{LLAMA}:llama_8b", "--cluster", "2x8xH100", "--json", tmp_path / "plan.json")
    assert found.exit_code == 0, found.output
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["num_devices"] == 16
    assert sum(facts["chosen"]["estimate"]["time_parts"].values()) == pytest.approx(
        facts["chosen"]["estimate"]["seconds"]
    )


def test_an_unknown_device_is_named_with_those_that_are_known() -> None:
    """The nearest names come first."""
    found = run("plan", DIGITS, "--cluster", "8xH10")
    assert found.exit_code == 2
    assert "H100" in found.output


# ---- auto -------------------------------------------------------------------------------------------------


def test_auto_takes_the_planned_layout_and_says_so(tmp_path: Path) -> None:
    """Training without a layout prints why it took which, and keeps the plan in the run's folder."""
    found = run("train", DIGITS, "--devices", "2", "--epochs", "1", "--run", tmp_path / "run")
    assert found.exit_code == 0, found.output
    assert "auto: Take " in found.output
    facts = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert facts["plan"]["chosen"]["layout"] == facts["layout"]


def test_auto_chooses_the_microbatch_and_prints_the_line(tmp_path: Path) -> None:
    """With microbatch_size="auto" the run says what to write into the job to repeat it."""
    open_job = job(microbatch_size="auto")
    result = mw.train(open_job, devices=2, run=tmp_path / "run", progress=False)
    line = next(n for n in result.notes if "microbatch" in n)
    size = int(json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]["chosen"]["microbatch_size"])
    assert str(size) in line
    fixed = open_job.with_fields(microbatch_size=size)
    again = mw.train(fixed, layout=result.layout, run=tmp_path / "again", progress=False)
    assert again.loss == result.loss


def settled_among_ranks(context: Any, asked: mw.Job, layout: str) -> tuple[str, Any, list[str]]:
    with mw.Session(asked, layout, device=context.device) as session:
        session.step(next(iter(session.batches())))
        return str(session.layout), session.job.microbatch_size, session.notes


@pytest.mark.parametrize("layout", ["auto", "dp=2"])
def test_ranks_that_run_already_settle_it_together(layout: str) -> None:
    """Under torchrun all ranks take the same layout and microbatch size, and say how to repeat the run."""
    asked = job(microbatch_size="auto")
    one, two = run_ranks(lambda c: settled_among_ranks(c, asked, layout), 2)
    assert one == two and isinstance(one[1], int)
    assert layout in ("auto", one[0])
    assert any(f"microbatch_size={one[1]}" in note for note in one[2])


def test_layouts_that_the_jobs_own_cuts_do_not_make_are_not_planned() -> None:
    """One named cut makes two stages, so four stages are rejected with that reason."""
    made = mw.plan(job(cuts=["2"]), devices=2, measure=False)
    assert all(c.layout.num_stages in (1, 2) for c in (made.chosen, *made.others))
    assert all(c.cuts == (1,) for c in (made.chosen, *made.others) if c.layout.pp == 2)


def test_a_session_alone_does_not_settle_it() -> None:
    """One device has nobody to plan for: the session says who can choose."""
    with pytest.raises(JobError, match="settled by meshwise.train"):
        mw.Session(job(microbatch_size="auto"), layout="dp=1")


def test_another_word_for_the_microbatch_is_refused() -> None:
    """Only "auto" is a word that can stand for a size."""
    with pytest.raises(JobError, match='a list of them, or "auto"'):
        job(microbatch_size="best")


# ---- compare and probe ----------------------------------------------------------------------------------


def test_compare_runs_layouts_and_writes_the_page(tmp_path: Path) -> None:
    """Two layouts are run, the page, the values and the pictures lie in the folder."""
    words = ["--layout", "dp=2", "--layout", "pp=2", "--turns", "1", "--seconds", "0.05", "--out", tmp_path / "out"]
    found = run("compare", DIGITS, "--devices", "2", *words)
    assert found.exit_code == 0, found.output
    facts = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [r["layout"] for r in facts["results"]] == ["dp=2", "pp=2,schedule=1f1b"]
    for r in facts["results"]:
        assert r["seconds"] and r["timeline"] and r["predicted_timeline"]
        assert sum(r["time_parts"].values()) > 0
        assert all(bar["measured"] > 0 for bar in r["memory"])
    assert (tmp_path / "out" / "comparison.html").stat().st_size > 5000
    assert (tmp_path / "out" / "step-time.svg").is_file()


def test_compare_refuses_what_cannot_be_run() -> None:
    """A layout that can only be planned is refused before anything starts."""
    with pytest.raises(LayoutError, match="tp=2 is not offered yet"):
        mw.compare(job(), 2, layouts=["tp=2"], turns=1, seconds=0.01)


def test_probe_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    """What it writes is a cluster that a plan can be made for."""
    found = run("probe", "--devices", "2", "--quick", "--json", tmp_path / "here.json")
    assert found.exit_code == 0, found.output
    plan = run("plan", DIGITS, "--cluster", tmp_path / "here.json", "--no-measure")
    assert "FLOP/s" in found.output
    assert plan.exit_code == 0, plan.output


# ---- what a plan rests on --------------------------------------------------------------------------------


def test_units_are_timed_in_both_halves() -> None:
    """Every unit has seconds; the halves of its backward add up to the whole."""
    found = survey(job(), devices=2, seconds=0.1)
    assert len(found.profile.units) >= 3
    for unit in found.profile.units:
        assert unit.seconds is not None and unit.seconds.forward > 0
        halves = unit.seconds.backward_input + unit.seconds.backward_weight
        assert halves == pytest.approx(unit.seconds.backward)
    assert found.profile.contention >= 1.0 and found.profile.peak_bytes


def test_a_trial_gives_steps_spans_and_peaks() -> None:
    """Every rank of a trial has a peak, and spans of each cell of its program."""
    trial = Trial(layout=Layout(pp=2))
    run_trials(job(), [trial], turn=Turn(seconds=0.02, max_steps=4), turns=1)
    assert trial.error == "" and len(trial.seconds) >= 3
    assert len(trial.peaks) == 2 and min(trial.peaks) > 0
    cells = [str(a) for row in trial.spans for a, _, _ in row if a is not None]
    assert {"F0.0", "F1.0", "B0.0", "B1.0", "update"} <= set(cells)


def test_a_trial_that_fails_keeps_its_error() -> None:
    """A layout that cannot run is left out of later turns, and the others go on."""
    bad, good = Trial(layout=Layout(pp=2, virtual=8, schedule="interleaved")), Trial(layout=Layout(dp=2))
    run_trials(job(), [bad, good], turn=Turn(seconds=0.02, max_steps=3, look=False), turns=2)
    assert "16 stages" in bad.error and bad.median == float("inf")
    assert good.error == "" and len(good.medians) == 2


def test_repeated_layers_are_counted_as_if_each_were_run() -> None:
    """A stack of equal layers gives the same figures for each but the first and the last."""
    deep = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    data = TensorDataset(torch.randn(8, 16), torch.randn(8, 16))
    profile = profiles_elsewhere(job(model=deep, loss=nn.MSELoss(), train_data=data), (4,))[0]
    inner = profile.units[1:-1]
    assert len({(u.saved_bytes, u.saved_input_bytes, u.work) for u in inner}) == 1
    assert inner[0].work[0].forward_flops or any(w.forward_flops for w in inner[0].work)
    assert sum(w.forward_flops for u in profile.units for w in u.work) == 8 * 2 * 4 * 16 * 16


def test_counting_takes_no_memory_and_leaves_the_model_as_it_is() -> None:
    """Real weights are only looked at: the same objects are in their places afterwards."""
    model = network()
    held = dict(model.named_parameters())
    count_model(job(model=model), model, (torch.randn(4, 32), torch.randint(0, 4, (4,))))
    assert all(model.get_parameter(n) is p for n, p in held.items())


def test_a_job_that_would_diverge_is_timed_all_the_same() -> None:
    """Timing repeats parts of one batch at a learning rate of zero, so that no loss runs away."""
    wild = job(optimizer=lambda p: torch.optim.SGD(p, lr=1e6))
    found = survey(wild, devices=2, seconds=0.1)
    assert found.profile.update_seconds > 0
