"""Checkpoints: the identity on every kind of state, whole or not there, the same bytes every time."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from machine import file_size_limit
from meshwise.checkpoint.manifest import FORMAT_VERSION, Manifest, differences
from meshwise.checkpoint.store import export_weights, latest, load_checkpoint, save_checkpoint
from meshwise.errors import CheckpointError

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
MANIFEST = Manifest.of_this_process(
    job="tiny", seed=7, batch_size=10, microbatch_sizes=(4, 4, 2), slots=1, num_parameters=3
)


def save(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **state: Any) -> Path:
    """Save a small checkpoint with what is given."""
    save_checkpoint(
        folder,
        tensors={"weight": torch.arange(6.0).reshape(2, 3)} if tensors is None else tensors,
        optimizer=state.get("optimizer", {"weight": {"step": torch.tensor(3.0)}}),
        extra=state.get("extra", {"step": 3}),
        manifest=state.get("manifest", MANIFEST),
    )
    return folder


def assert_identical(a: Any, b: Any) -> None:
    """Compare nested values bit for bit, with their types."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert bytes_of(a) == bytes_of(b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_identical(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_identical(left, right)
    else:
        assert a == b or str(a) == str(b) == "nan"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Give a tensor's values as bytes."""
    return tensor.resolve_conj().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def digest(file: Path) -> str:
    """Give a file's checksum."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# The identity


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint32,
]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 3), (0, 4), (2, 3, 4)])
def test_tensors_of_every_dtype_and_shape_come_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Saving and loading is the identity, into aligned memory (B070)."""
    torch.manual_seed(0)
    tensors = {f"t.{dtype}": (torch.randn(shape) * 3).abs().to(dtype) for dtype in DTYPES}
    loaded = load_checkpoint(save(tmp_path / "c", tensors)).tensors
    assert set(loaded) == set(tensors)
    for name, tensor in loaded.items():
        assert_identical(tensor, tensors[name])
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


def test_odd_memory_layouts_come_back_by_value(tmp_path: Path) -> None:
    """Strided, sliced, expanded, overlapping, conjugate and special values are saved as they read."""
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "rows": base[1:3],
        "columns": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "reshaped": base.view(-1),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "special": torch.tensor([torch.nan, torch.inf, -0.0]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    loaded = load_checkpoint(save(tmp_path / "c", tensors)).tensors
    for name, tensor in tensors.items():
        assert_identical(loaded[name], tensor.detach().resolve_conj())


OPTIMIZER = {
    "a.weight": {
        "step": torch.tensor(3.0),
        "exp_avg": torch.randn(5, 3),
        "lr": 0.1,
        "flag": True,
        "none": None,
    },
    "a/odd name": {"state": [torch.ones(2), (1, 2.5, "text")], "nested": {"deep": {"x": torch.zeros(())}}},
    "scalar": {"betas": (0.9, 0.999), "nan": float("nan"), "big": 2**80, "tiny": 5e-324},
    "empty": {},
}
EXTRA = {
    "step": 12,
    "scheduler": {"milestones": {3: 1, 5: 2}, "$odd": [], "last_lr": [0.1]},
    "groups": [{"lr": torch.tensor(0.1), "betas": (0.9, 0.999)}],
}


def test_optimizer_and_extra_state_come_back(tmp_path: Path) -> None:
    """Tensors, exact numbers, tuples and dicts with integer keys survive (B070)."""
    loaded = load_checkpoint(save(tmp_path / "c", optimizer=OPTIMIZER, extra=EXTRA))
    assert_identical(loaded.optimizer, OPTIMIZER)
    assert_identical(loaded.extra, EXTRA)
    assert loaded.manifest == MANIFEST


def test_numpy_numbers_and_other_mappings_become_plain(tmp_path: Path) -> None:
    """A numpy scalar is a number and a Counter a dict after loading."""
    extra = {"loss": np.float64(0.5), "count": collections.Counter({3: 2})}
    assert load_checkpoint(save(tmp_path / "c", extra=extra)).extra == {"loss": 0.5, "count": {3: 2}}


@pytest.mark.parametrize(
    ("tensors", "extra", "message"),
    [
        ({"a": torch.ones(2).to_sparse()}, {}, '"a".*sparse.*to_dense'),
        ({"a": torch.ones(2, dtype=torch.complex128)}, {}, '"a".*complex128'),
        ({"a": torch.ones(2, device="meta")}, {}, '"a".*meta'),
        ({}, {"scheduler": {"f": len}}, "extra/scheduler/f is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], extra: dict[str, Any], message: str
) -> None:
    """The message names the value, and nothing is left on the disk."""
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "c", tensors, extra=extra)
    assert list(tmp_path.iterdir()) == []


class Tied(torch.nn.Module):
    """Use one matrix twice, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path: Path) -> None:
    """A tied weight takes its bytes once, and both names give the same tensor."""
    model = Tied()
    folder = save(tmp_path / "c", model.state_dict())
    assert set(load_file(folder / "model.safetensors")) == {"embed.weight", "count"}
    loaded = load_checkpoint(folder).tensors
    assert loaded["embed.weight"] is loaded["head.weight"]
    fresh = Tied()
    fresh.load_state_dict(loaded)
    assert_identical(dict(fresh.state_dict()), dict(model.state_dict()))


def test_exported_weights_load_in_the_plain_model(tmp_path: Path) -> None:
    """The export has every name of the model, tied ones too, and the same bytes every time."""
    model = Tied()
    folder = save(tmp_path / "c", model.state_dict())
    files = [tmp_path / "out" / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        export_weights(folder, file)
    fresh = Tied()
    fresh.load_state_dict(load_file(files[0]))
    assert_identical(dict(fresh.state_dict()), dict(model.state_dict()))
    assert digest(files[0]) == digest(files[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.safetensors", "c", "out"]


def test_a_plain_process_reads_model_and_optimizer(tmp_path: Path) -> None:
    """A fresh process without a group gives state that loads in the plain model and optimizer (B076)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = {name: optimizer.state_dict()["state"][place] for place, name in enumerate(names)}
    groups = optimizer.state_dict()["param_groups"]
    save(tmp_path / "c", model.state_dict(), optimizer=state, extra={"step": 3, "groups": groups})
    code = f"""
import torch
from pathlib import Path
from meshwise.checkpoint.store import load_checkpoint
checkpoint = load_checkpoint(Path({str(tmp_path / "c")!r}))
model = torch.nn.Linear(3, 5)
model.load_state_dict(checkpoint.tensors)
optimizer = torch.optim.AdamW(model.parameters())
names = [name for name, _ in model.named_parameters()]
state = {{place: checkpoint.optimizer[name] for place, name in enumerate(names)}}
optimizer.load_state_dict({{"state": state, "param_groups": checkpoint.extra["groups"]}})
assert not torch.distributed.is_initialized()
torch.save((model.state_dict(), optimizer.state_dict()), {str(tmp_path / "seen.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    seen_model, seen_optimizer = torch.load(tmp_path / "seen.pt")
    assert_identical(dict(seen_model), dict(model.state_dict()))
    assert_identical(seen_optimizer, optimizer.state_dict())


# Bytes


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    """Neither order, memory layout, time nor process changes a byte of model.safetensors."""
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import save, variants
from pathlib import Path
save(Path({str(tmp_path / "other")!r}), variants()[2])
"""
    first, second, _ = variants()
    save(tmp_path / "first", first)
    save(tmp_path / "second", second, manifest=dataclasses.replace(MANIFEST, created="2000-01-01"))
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "5"}
    )
    assert len({digest(tmp_path / name / "model.safetensors") for name in ("first", "second", "other")}) == 1


def variants() -> list[dict[str, torch.Tensor]]:
    """Give one model state in three orders and memory layouts."""
    weight, half = torch.arange(6.0).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16)
    flags, count = torch.tensor([True, False]), torch.tensor(4)
    strided = weight.t().contiguous().t()
    return [
        {"w": weight, "tied": weight, "h": half, "f": flags, "n": count},
        {"n": count, "f": flags, "h": half, "tied": weight, "w": weight},
        {"tied": strided, "h": half.clone(), "w": strided, "n": count.clone(), "f": flags},
    ]


# Whole or not there


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "flipped"])
def test_a_torn_checkpoint_is_never_taken_for_one(tmp_path: Path, name: str, damage: str) -> None:
    """A missing, short, long or changed file is found, said, and passed over by latest."""
    good, torn = save(tmp_path / "step-1", extra={"step": 1}), save(tmp_path / "step-2", extra={"step": 2})
    assert latest(tmp_path) == torn
    spoil(torn / name, damage)
    with pytest.raises(CheckpointError, match="torn|truncated|damaged|no checkpoint"):
        load_checkpoint(torn)
    with pytest.raises(CheckpointError):
        export_weights(torn, tmp_path / "out.safetensors")
    assert latest(tmp_path) == good


def spoil(file: Path, damage: str) -> None:
    """Damage a file in one of the ways a disk or a kill can."""
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {"empty": b"", "truncated": content[:-1], "longer": content + b"\0", "flipped": flipped}[damage]
        )


def test_every_bit_of_the_state_file_is_guarded(tmp_path: Path) -> None:
    """Whatever character of state.json changes, the checkpoint is refused or reads the same."""
    folder = save(tmp_path / "c")
    content, expected = (folder / "state.json").read_text(), load_checkpoint(folder)
    for place, letter in enumerate(content):
        changed = content[:place] + ("1" if letter == "0" else "0") + content[place + 1 :]
        (folder / "state.json").write_text(changed)
        try:
            loaded = load_checkpoint(folder)
        except CheckpointError:
            continue
        assert loaded.manifest == expected.manifest and loaded.extra == expected.extra


def test_another_format_version_is_named(tmp_path: Path) -> None:
    """A checkpoint of a later format is refused with both versions."""
    save(tmp_path / "c", manifest=dataclasses.replace(MANIFEST, format_version=99, meshwise_version="9.0"))
    with pytest.raises(
        CheckpointError, match=rf"format version 99 \(written by meshwise 9.0\).*{FORMAT_VERSION}"
    ):
        load_checkpoint(tmp_path / "c")


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    """No folder, an empty folder and a folder without checkpoints are told apart from a checkpoint."""
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="has no state.json"):
        load_checkpoint(tmp_path)
    assert latest(tmp_path) is None and latest(tmp_path / "nothing") is None


def test_latest_goes_by_the_step(tmp_path: Path) -> None:
    """Steps are compared as numbers, whatever the folders are called."""
    for step in (9, 10, 2):
        save(tmp_path / f"step-{step}", extra={"step": step})
    (tmp_path / "other").mkdir()
    (tmp_path / "note.txt").write_text("")
    assert latest(tmp_path) == tmp_path / "step-10"


def test_saving_again_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    """A second save under the same name holds the new state, and left-overs of a kill are cleared."""
    save(tmp_path / "c", extra={"step": 1})
    (tmp_path / ".c.partial").mkdir()
    (tmp_path / ".c.partial" / "model.safetensors").write_text("half")
    save(tmp_path / "c", extra={"step": 2})
    assert load_checkpoint(tmp_path / "c").extra == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == sorted(FILES)
    assert len({path.stat().st_mode for path in (tmp_path / "c").iterdir()}) == 1


def test_a_save_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    """The old checkpoint is still loaded and found, and the next save clears up."""
    save(tmp_path / "c", extra={"step": 1})
    os.rename(tmp_path / "c", tmp_path / ".c.replaced")
    assert load_checkpoint(tmp_path / "c").extra == {"step": 1}
    found = latest(tmp_path)
    assert found is not None and load_checkpoint(found).extra == {"step": 1}
    save(tmp_path / "c", extra={"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """When a write fails, the error says so, and what was there stays whole."""
    folder = save(tmp_path / "c", extra={"step": 1})
    with file_size_limit(50_000), pytest.raises(CheckpointError, match="could not write.*unchanged"):
        save(folder, {"weight": torch.zeros(100_000)}, extra={"step": 2})
    assert load_checkpoint(folder).extra == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with file_size_limit(10), pytest.raises(CheckpointError, match="could not write"):
        export_weights(folder, tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def save_and_die(folder: Path, call: int) -> None:
    """Save step 2 in this process, which kills itself at the given sync or rename, counted from 1."""
    calls = itertools.count(1)

    def counted(original: Any) -> Any:
        def function(*args: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        return function

    os.fsync, os.rename = counted(os.fsync), counted(os.rename)
    save(folder, extra={"step": 2})


def test_a_save_killed_at_any_call_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    """SIGKILL at each sync and rename of a save leaves a checkpoint that loads, the old or the new one."""
    folder, steps = tmp_path / "c", []
    for call in range(1, 8):
        save(folder, extra={"step": 1})
        process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(folder, call))
        process.start()
        process.join(timeout=60)
        assert process.exitcode == -signal.SIGKILL
        steps.append(load_checkpoint(folder).extra["step"])
        found = latest(tmp_path)
        assert found is not None and load_checkpoint(found).extra["step"] == steps[-1]
    assert steps == [1] * 6 + [2], "three files, one folder and two renames come before the last sync"


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    """Saving into a folder of the user's own, or onto a file, is refused."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis.txt.*folder of its own"):
        save(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        save(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


# The manifest


def test_the_manifest_comes_back_from_json() -> None:
    """Through JSON text and back is the identity, and fields that do not fit are named."""
    values = json.loads(json.dumps(MANIFEST.to_json()))
    assert Manifest.from_json(values) == MANIFEST
    with pytest.raises(CheckpointError, match=r"lacks \['seed'\].*unknown \['sead'\]"):
        Manifest.from_json({("sead" if key == "seed" else key): value for key, value in values.items()})
    assert "seed 7" in str(MANIFEST)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Manifest)])
def test_each_difference_is_one_sentence(name: str) -> None:
    """Every field but the time of writing counts for a resume, with both values."""
    value: Any = {"microbatch_sizes": (5, 5)}.get(name, 123)
    changed = dataclasses.replace(MANIFEST, **{name: value})
    found = differences(MANIFEST, changed)
    if name == "created":
        assert found == []
    else:
        assert found == [
            f"{name} was {getattr(MANIFEST, name)!r} when the run was saved and is {value!r} now."
        ]
    assert differences(MANIFEST, MANIFEST) == []


def test_the_manifest_does_not_import_torch() -> None:
    """A report reads manifests without torch."""
    code = "import sys, meshwise.checkpoint.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
