"""Save and load checkpoints: a folder that is either whole or not there.

::

    checkpoint/
      model.safetensors      parameters and buffers under the model's own names, tied ones once
      optimizer.safetensors  tensors of the optimizer state and of the run's other state
      state.json             everything else, the manifest, and size and checksum of the other two

Everything runs in one plain process, without a process group: gather first, then save on one rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from meshwise.checkpoint.codec import decode, encode
from meshwise.checkpoint.manifest import Manifest, check_format
from meshwise.errors import CheckpointError

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_HEADER_KEY = "meshwise"  # one key only: the order of several in a safetensors header is random


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Hold a loaded checkpoint; all tensors are on the CPU, tied names share one tensor.

    ``optimizer`` is the state by parameter name, ``extra`` the step, epoch, schedule and so on.
    """

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    extra: dict[str, Any]
    manifest: Manifest


def save_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, Any],
    manifest: Manifest,
) -> None:
    """Save a checkpoint in ``folder``, whole or not at all; one that is there already is replaced.

    Call it on one rank with full tensors. The same tensors give the same bytes of ``model.safetensors``.

    Args:
        folder: written beside itself first, then renamed.
        tensors: the model's state under its own names; the same tensor under two names is stored once.
        optimizer: for each parameter name its state, nested as it likes, of tensors, numbers and text.
        extra: the rest, of the same values; ``extra["step"]`` is what `latest` goes by.
        manifest: the facts of the run.

    Raises:
        CheckpointError: a value cannot be stored, the disk refuses, or ``folder`` holds other files.
    """
    _check_target(folder)
    with _write_beside(folder) as partial:
        unique, aliases = _split_tied(tensors)
        header = json.dumps({"aliases": aliases}, sort_keys=True)
        _save_tensors(partial / _MODEL, unique, header={_HEADER_KEY: header})
        rest: dict[str, torch.Tensor] = {}
        body = {
            "optimizer": encode(optimizer, "optimizer", rest),
            "extra": encode(extra, "extra", rest),
            "manifest": manifest.to_json(),
        }
        _save_tensors(partial / _OPTIMIZER, rest, header={_HEADER_KEY: "{}"})
        body["files"] = {name: _fingerprint(partial / name) for name in (_MODEL, _OPTIMIZER)}
        _write_state(partial / _STATE, body)
        for name in (_MODEL, _OPTIMIZER):
            shutil.copymode(partial / _STATE, partial / name)
            _sync(partial / name)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load a checkpoint in any process; every byte is checked first.

    Raises:
        CheckpointError: it is missing, torn, truncated, damaged or of another format version.
    """
    folder = _existing(folder)
    state = _check(folder)
    model, rest = _load_tensors(folder / _MODEL), _load_tensors(folder / _OPTIMIZER)
    for name, first in _aliases(folder / _MODEL).items():
        model[name] = model[first]
    return Checkpoint(
        tensors=model,
        optimizer=decode(state["optimizer"], rest),
        extra=decode(state["extra"], rest),
        manifest=Manifest.from_json(state["manifest"]),
    )


def latest(folder: Path) -> Path | None:
    """Find the whole checkpoint with the highest ``extra["step"]`` among the subfolders, or None.

    Torn ones are passed over; the one found was checked byte for byte.
    """
    if not folder.is_dir():
        return None
    steps = [(_step(path), path.name, path) for path in _saved_in(folder)]
    for step, _, path in sorted(steps, reverse=True):
        if step >= -1 and _is_whole(path):
            return path
    return None


def export_weights(checkpoint_folder: Path, to: Path) -> None:
    """Write the weights as one plain safetensors file under the model's own names.

    Each tied name gets a full copy, so ``model.load_state_dict(load_file(to))`` works. The same weights give
    the same bytes.

    Raises:
        CheckpointError: the checkpoint is not whole, or the disk refuses.
    """
    folder = _existing(checkpoint_folder)
    _check(folder)
    tensors = _load_tensors(folder / _MODEL)
    copies = {name: tensors[first].clone() for name, first in _aliases(folder / _MODEL).items()}
    partial = _sibling(to, "partial")
    with _disk_errors(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        _save_tensors(partial, tensors | copies, header={"format": "pt"})
        shutil.copymode(folder / _STATE, partial)
        _sync(partial)
        os.replace(partial, to)
        _sync(to.parent)


# Tensors


def _split_tied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split names into those that are stored and those that are another name of a stored one."""
    first: dict[Any, str] = {}
    for name in sorted(tensors):
        first.setdefault(_place(name, tensors[name]), name)
    unique = {name: tensors[name] for name in first.values()}
    aliases = {name: first[_place(name, tensors[name])] for name in tensors if name not in unique}
    return unique, aliases


def _place(name: str, tensor: torch.Tensor) -> Any:
    """Give where a tensor's values lie; two tensors of one place are tied. A name where there is no place."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return name
    return (
        str(tensor.device),
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
    )


def _save_tensors(file: Path, tensors: Mapping[str, torch.Tensor], *, header: dict[str, str]) -> None:
    """Write a safetensors file; its bytes depend on names, values and header alone."""
    seen: set[int] = set()
    plain = {name: _plain(name, tensors[name], seen) for name in sorted(tensors)}
    save_file(plain, file, metadata=header)


def _plain(name: str, tensor: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """Give a tensor as the file format wants it: dense, contiguous, on the CPU, in memory of its own."""
    strange = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta
    if strange or tensor.dtype is torch.complex128:
        raise CheckpointError(
            f'tensor "{name}" is {tensor.dtype}, {tensor.layout}, on {tensor.device}; a checkpoint holds '
            "dense tensors of real types and complex64; convert it (to_dense(), view_as_real) before saving."
        )
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    storage = plain.untyped_storage()
    if storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.element_size():
        plain = plain.clone()
    seen.add(plain.untyped_storage().data_ptr())
    return plain


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read tensors into aligned memory of their own: mapped ones are not, and bits may depend on it."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(file).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} is no whole safetensors file: {error}") from error


def _aliases(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, framework="pt") as opened:
        aliases: dict[str, str] = json.loads(opened.metadata()[_HEADER_KEY])["aliases"]
    return aliases


# State and checksums


def _write_state(file: Path, body: Mapping[str, Any]) -> None:
    file.write_text(json.dumps({"sha256": _digest(body), **body}, indent=1), encoding="utf-8")
    _sync(file)


def _read_state(folder: Path) -> dict[str, Any]:
    """Read state.json, whose checksum guards the checksums of the other files."""
    file = folder / _STATE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {_STATE}: no checkpoint, or one that was torn while it was written."
        )
    try:
        body: dict[str, Any] = json.loads(file.read_bytes())
        whole = body.pop("sha256") == _digest(body)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{file} is torn or was changed: its checksum is wrong. Use an earlier checkpoint."
        )
    manifest = body["manifest"]
    check_format(manifest.get("format_version"), str(manifest.get("meshwise_version")))
    return body


def _check(folder: Path) -> dict[str, Any]:
    """Read the state and check size and checksum of every file that it names."""
    state = _read_state(folder)
    for name, expected in state["files"].items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} is torn: {name} is missing. Use an earlier checkpoint.")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{file} is truncated: {size} bytes of {expected['bytes']}. Use an earlier checkpoint."
            )
        if _fingerprint(file) != expected:
            raise CheckpointError(f"{file} is damaged: its checksum is wrong. Use an earlier checkpoint.")
    return state


def _is_whole(folder: Path) -> bool:
    try:
        _check(_existing(folder))
    except CheckpointError:
        return False
    return True


def _step(folder: Path) -> int:
    """Give the step of a checkpoint, -1 if it has none, -2 if its state cannot be read."""
    try:
        step = _read_state(_existing(folder))["extra"].get("step")
    except CheckpointError:
        return -2
    return step if isinstance(step, int) else -1


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _fingerprint(file: Path) -> dict[str, Any]:
    checksum = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            checksum.update(block)
    return {"bytes": file.stat().st_size, "sha256": checksum.hexdigest()}


# Folders: the partial one beside the final one, and the final one that is replaced


def _sibling(folder: Path, suffix: str) -> Path:
    """Give a hidden folder beside another; always the same one, so that a killed save leaves one at most."""
    folder = folder.absolute()
    return folder.with_name(f".{folder.name}.{suffix}")


def _check_target(folder: Path) -> None:
    """Refuse to replace anything but a checkpoint."""
    if folder.is_dir():
        others = sorted({path.name for path in folder.iterdir()} - {_MODEL, _OPTIMIZER, _STATE})
        if not others:
            return
        raise CheckpointError(
            f"{folder} holds other files ({', '.join(others[:3])}), which a checkpoint would replace; name a "
            f"folder of its own, such as {folder / 'checkpoint'}."
        )
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; name a folder for the checkpoint.")


@contextmanager
def _write_beside(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write in, which takes the place of ``folder`` if all goes well."""
    partial = _sibling(folder, "partial")
    try:
        with _disk_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            _sync(partial)
            _replace(partial, folder.absolute())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(partial: Path, folder: Path) -> None:
    """Rename the new checkpoint into place; the old one is kept beside it until that is on the disk."""
    replaced = _sibling(folder, "replaced")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(folder, replaced)
    os.rename(partial, folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _saved_in(folder: Path) -> set[Path]:
    """List the subfolders that may be checkpoints, under the names they were saved as."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    return {
        folder / re.sub(r"^\.(.*)\.replaced$", r"\1", name)
        for name in names
        if not re.match(r"\..*\.partial$", name)
    }


def _existing(folder: Path) -> Path:
    """Find the checkpoint's folder; between the two renames of a killed save it has its other name."""
    if folder.is_dir():
        return folder
    replaced = _sibling(folder, "replaced")
    if replaced.is_dir():
        return replaced
    raise CheckpointError(f"there is no checkpoint {folder}.")


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"could not write {target}: {error}. What was there before is unchanged; free space or name "
            "another folder, and save again."
        ) from error


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
