"""Nested optimizer and run state as plain JSON and a flat table of tensors, and back, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from meshwise.errors import CheckpointError

# JSON has no tensors, no tuples and no keys but strings; each becomes an object with one of these keys.
_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Give ``value`` as JSON; its tensors are put into ``tensors`` under their path.

    Raises:
        CheckpointError: a value is neither number, text, tensor nor a container of these.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; keep numbers, text, tensors "
        "and lists, tuples or dicts of them in the state."
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    items = {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {_PAIRS: [[encode(key, f"{path} key", tensors), item] for key, item in items.items()]}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Give back what `encode` was given; mappings of any kind come back as dict."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decode(item, tensors) for item in value[_TUPLE])
    if _PAIRS in value:
        return {decode(key, tensors): decode(item, tensors) for key, item in value[_PAIRS]}
    return {key: decode(item, tensors) for key, item in value.items()}
