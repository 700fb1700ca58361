"""One job, many layouts, the same bytes: exported weights in real ranks, and proof that the test can fail."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

import meshwise as mw
from meshwise.checkpoint.store import export_weights, latest
from meshwise.parallel.reduce import Reducer
from meshwise.parallel.shared_reduce import SharedReducer
from scenarios import Run, assert_same_bits, same, train_in_memory

EXAMPLES = Path(__file__).parents[1] / "examples"
LAYOUTS = (
    "dp=2",
    "dp=3",
    "dp=4",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=1f1b",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zero-bubble",
    "pp=4",
    "dp=2,pp=2",
    "dp=2,pp=2,recompute=true",
)
JOBS = ("digits_mlp", "vgg16", "gpt")


@cache
def example(name: str) -> Any:
    """Import an example by its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class DigitsNet(nn.Module):
    """The digits network with dropout and more layers, so that it can be cut in 4."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 64)
        self.relu = nn.ReLU(inplace=True)
        self.middle = nn.Linear(64, 64)
        self.more = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.2)
        self.output = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to logits, with a skip connection over two layers."""
        x = self.dropout(self.relu(self.hidden(x.view(-1, 784))))
        y = self.relu(self.middle(x))
        return self.output(self.dropout(self.more(y)) + x)


def small_job(name: str) -> mw.Job:
    """Make a job with dropout, AdamW, clipping, uneven microbatches and a last uneven batch: 3 steps an epoch."""
    module = example(name)
    base = module.job() if name == "digits_mlp" else module.job_small()
    changes: dict[str, Any] = {"model": DigitsNet} if name == "digits_mlp" else {}
    return base.with_fields(
        **changes,
        train_data=Subset(base.train_data, range(49)),
        eval_data=None,
        metrics={},
        epochs=1,
        batch_size=20,
        microbatch_size=[3, 5, 4, 1, 7],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        clip_grad_norm=0.5,
    )


def exported(job: mw.Job, layout: str, folder: Path) -> bytes:
    """Train a job in real ranks and give the bytes of its exported weights."""
    result = mw.train(job, layout=layout, run=folder / layout, progress=False)
    checkpoint = latest(result.folder / "checkpoints")
    assert checkpoint is not None and result.num_steps == 3
    export_weights(checkpoint, folder / "weights.safetensors")
    return (folder / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Train each job on one device."""
    return {name: exported(small_job(name), "dp=1", tmp_path_factory.mktemp(name)) for name in JOBS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", JOBS)
def test_exported_weights_are_byte_identical(
    name: str, layout: str, reference: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps in real ranks that share memory give, under every layout, the bytes that one device gives."""
    monkeypatch.setenv("MESHWISE_TRANSPORT", "shared")
    assert exported(small_job(name), layout, tmp_path) == reference[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_weights_are_byte_identical_through_sockets(
    layout: str, reference: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through the process group: how ranks reach one another changes no bit."""
    monkeypatch.setenv("MESHWISE_TRANSPORT", "gloo")
    assert exported(small_job("digits_mlp"), layout, tmp_path) == reference["digits_mlp"]


def same_bits(a: Run, b: Run) -> bool:
    """Tell whether two runs agree in every weight."""
    return a.params.keys() == b.params.keys() and all(same(a.params[k], b.params[k]) for k in a.params)


@pytest.mark.parametrize("dp", range(1, 9))
def test_any_number_of_replicas_gives_the_same_bits(dp: int) -> None:
    """1 to 8 replicas, also those that do not divide the 8 slots, end in the same state."""
    job = small_job("digits_mlp").with_fields(microbatch_size=2)
    assert_same_bits(train_in_memory(job, f"dp={dp}"), train_in_memory(job, "dp=1"))


def test_parity_fails_without_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exchange of gradients taken out, two replicas no longer agree with one device."""
    job = small_job("digits_mlp")
    right = train_in_memory(job, "dp=1")
    assert same_bits(train_in_memory(job, "dp=2", per_host=1), right)

    def only_mine(self: Reducer, index: int, bucket: Any) -> Any:
        yield
        return next(iter(bucket.nodes.values()), [None] * len(bucket.sites))

    monkeypatch.setattr(Reducer, "_exchange", only_mine)
    with pytest.raises(AssertionError, match="ranks report different results"):
        train_in_memory(job, "dp=2", per_host=1)
    job = job.with_fields(clip_grad_norm=None)  # nothing but the gradients differs now
    with pytest.raises(AssertionError, match="ranks hold different values"):
        train_in_memory(job, "dp=2", steps=1, per_host=1)


def test_parity_fails_without_the_addition_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other replica's rows left out of the sums, two replicas no longer agree with one device."""
    job = small_job("digits_mlp")
    right = train_in_memory(job, "dp=1")
    assert same_bits(train_in_memory(job, "dp=2"), right)

    def only_first(self: SharedReducer, start: int, stop: int, dtype: torch.dtype) -> Any:
        yield
        return next(iter(self.rows.values()))[start:stop].view(dtype)

    monkeypatch.setattr(SharedReducer, "fold", only_first)
    assert not same_bits(train_in_memory(job, "dp=2"), right)


def test_parity_fails_with_another_order_of_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding the same gradients in another order is noticed: the comparison hides nothing."""
    job = small_job("digits_mlp")
    right = train_in_memory(job, "dp=1")
    monkeypatch.setattr("meshwise.grid.tree_split", lambda low, high: low + 1)
    assert not same_bits(train_in_memory(job, "dp=1"), right)
