"""The command line, the README's words and the examples, as a new user meets them."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

import meshwise as mw
from meshwise.cli import app, load_job, parse_change
from meshwise.errors import JobError, LaunchError

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(*words: str | Path) -> Result:
    """Run one command line in this process (its ranks are processes of their own)."""
    return CliRunner().invoke(app, [str(w) for w in words])


def test_train_resume_and_export(tmp_path: Path) -> None:
    """Training, going on under another layout and exporting work in a row, and the weights load in the plain model."""
    words = ["--layout", "dp=2", "--epochs", "1", "--run", tmp_path / "run"]
    first = run("train", EXAMPLES / "digits_mlp.py", *words)
    assert first.exit_code == 0, first.output
    assert "300 test samples, each once" in first.output and "layout dp=2 on 2 devices" in first.output
    again = run(
        "train", EXAMPLES / "digits_mlp.py", "--layout", "pp=2", "--epochs", "2", "--resume", tmp_path / "run"
    )
    assert again.exit_code == 0 and "24 steps" in again.output, again.output
    out = tmp_path / "weights.safetensors"
    assert run("export", tmp_path / "run", "--to", out).exit_code == 0
    model = load_job(str(EXAMPLES / "digits_mlp.py"), []).model()  # type: ignore[operator]
    model.load_state_dict(load_file(out))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--set", "batch_size=32"], "batch_size was 64 when the run was saved and is 32 now"),
        (["--set", "seed=1"], "seed was 0"),
        (["--set", "drop_last=True"], "does not fit the 1497 samples"),
    ],
)
def test_a_run_goes_on_only_as_the_job_it_began_as(changes: list[str], message: str, tmp_path: Path) -> None:
    """Resuming with another batch size, seed or count of samples is refused with both values."""
    words = ["train", EXAMPLES / "digits_mlp.py", "--devices", "1", "--run", tmp_path / "run"]
    assert run(*words, "--epochs", "1").exit_code == 0
    again = run(*words, "--epochs", "2", "--resume", tmp_path / "run", *changes)
    assert again.exit_code == 2
    assert message in again.output


def test_verify_says_so_and_exits_with_0() -> None:
    """The verdict on a right job can be pasted: bit-identical, the steps, the samples, each once."""
    result = run("verify", EXAMPLES / "digits_mlp.py", "--layout", "dp=2", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "bit-identical to one device over 2 steps; 128 samples, each once" in result.output
    assert "the same up to rounding" in result.output


DIFFERENT = """
import os, torch, meshwise as mw
from torch import nn
from torch.utils.data import TensorDataset

class Rank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.b(self.a(x) * (1 + torch.distributed.get_rank()))

data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(16, 2))
job = mw.Job(model=Rank, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data,
             batch_size=8)
"""


def test_verify_exits_with_1_and_names_the_first_difference(tmp_path: Path) -> None:
    """A model that looks at its rank is caught: exit code 1, the step, what differs and a likely cause."""
    (tmp_path / "rank_job.py").write_text(DIFFERENT)
    result = run("verify", tmp_path / "rank_job.py", "--layout", "dp=2", "--no-plain")
    assert result.exit_code == 1, result.output
    assert "NOT the same as one device. step 0: loss differs on rank 0" in result.output
    assert "Likely cause" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "missing.py"], "there is no file 'missing.py'"),
        (["train", f"{EXAMPLES / 'digits_mlp.py'}:nothing"], "has no 'nothing'"),
        (["train", EXAMPLES / "digits_mlp.py", "--layout", "tp=2"], "tp=2 is not offered yet"),
        (["train", EXAMPLES / "digits_mlp.py", "--layout", "dq=2"], "unknown key 'dq'"),
        (["train", EXAMPLES / "digits_mlp.py", "--layout", "dp=2", "--devices", "3"], "uses 2 devices"),
        (["train", EXAMPLES / "digits_mlp.py", "--layout", "dp=9"], "use dp=8 at most"),
        (["train", EXAMPLES / "digits_mlp.py", "--layout", "pp=5"], "Use at most pp=2,"),
        (["train", EXAMPLES / "digits_mlp.py", "--set", "sise=3"], "no field of a Job"),
        (["train", EXAMPLES / "digits_mlp.py", "--resume", "nowhere"], "nowhere"),
        (["export", "nowhere", "--to", "x"], "nowhere"),
    ],
)
def test_mistakes_get_a_message_and_exit_code_2(words: list[str | Path], message: str) -> None:
    """What a user gets wrong ends before the first step with what is possible instead."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_changes_are_python_values_or_plain_text() -> None:
    """--set reads literals, leaves other text as it is, and refuses what has no '='."""
    assert parse_change("batch_size=8") == ("batch_size", 8)
    assert parse_change("batch_norm=microbatch") == ("batch_norm", "microbatch")
    with pytest.raises(JobError, match="write FIELD=VALUE"):
        parse_change("epochs")


def test_the_readmes_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python example of the README runs word for word."""
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    space: dict[str, object] = {"__name__": "readme"}
    exec(compile(code[0], "README.md", "exec"), space)
    exec(compile(code[1], "README.md", "exec"), space)
    assert isinstance(space["job"], mw.Job)


@pytest.mark.parametrize(
    ("example", "layout"),
    [("vgg16.py:job_uneven_small", "pp=2"), ("hf_bert.py:job_small", "dp=2"), ("hf_bert.py:job_small", "pp=2")],
)
def test_examples_train_at_a_small_size(example: str, layout: str, tmp_path: Path) -> None:
    """Examples whose bytes are not compared elsewhere train a few steps in real ranks, to a finite loss."""
    job = load_job(str(EXAMPLES / example), [])
    result = mw.train(job, layout=layout, steps=2, run=tmp_path / "run", progress=False)
    assert result.num_steps == 2
    assert torch.isfinite(torch.tensor(result.loss))


IMPORTED = """
import torch, meshwise as mw
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 2)
    def forward(self, x):
        return self.a(x)

job = mw.Job(model=Net, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
             train_data=TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2)), batch_size=8)
mw.train(job, devices=2, progress=False)
"""


def test_a_module_that_trains_when_imported_is_refused_in_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks never start ranks: the message says to guard the call."""
    (tmp_path / "trains_on_import.py").write_text(IMPORTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match="__main__"):
        importlib.import_module("trains_on_import")


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers, and attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map sequences to scores."""
        return self.head(self.attention(self.lstm(x)[0]).mean(1))


def test_dropout_inside_calls_is_left_out_of_the_plain_comparison() -> None:
    """Recurrent and attention dropout, and a weighted loss, do not keep the plain loop from agreeing."""
    data = TensorDataset(torch.randn(24, 5, 8), torch.randint(0, 3, (24,)))
    job = mw.Job(
        model=Recurrent(),
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train_data=data,
        batch_size=12,
        microbatch_size=5,
    )
    verdict = mw.verify(job, "dp=2", steps=2)
    assert verdict, str(verdict)
    assert "the same up to rounding" in str(verdict)
