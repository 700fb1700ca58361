"""Which samples a step holds: a keyed order of the epoch, and the place of a run in it."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwise.errors import DataError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLY_A = 0xBF58476D1CE4E5B9
_MULTIPLY_B = 0x94D049BB133111EB

# First argument of `mix`, so that keys of different purposes never meet.
_ORDER_PURPOSE = 0x6F72646572
_SAMPLE_PURPOSE = 0x73616D706C65


@dataclass(frozen=True, kw_only=True)
class Position:
    """Hold the place of a run in its data: the next step to do is ``step`` of ``epoch`` (both from 0)."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


def mix(*ints: int) -> int:
    """Mix any integers into one key in 0..2**63-1; their order counts, and the low 64 bits of each.

    The finalizer is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    The values are part of what a run means: they never change between versions.
    """
    state = len(ints)
    for value in ints:
        state = ((state + _GAMMA) ^ value) & _MASK
        state = ((state ^ (state >> 30)) * _MULTIPLY_A) & _MASK
        state = ((state ^ (state >> 27)) * _MULTIPLY_B) & _MASK
        state ^= state >> 31
    return state >> 1


def sample_key(seed: int, epoch: int, index: int) -> int:
    """Give the random key of one sample in one epoch, in 0..2**63-1."""
    return mix(_SAMPLE_PURPOSE, seed, epoch, index)


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Give the sample ids of an epoch in the order in which they are trained on.

    A function of its arguments alone: no state, no rank, no library's random stream. Shuffled, each id gets
    a keyed 64-bit number (a vector `mix`) and the ids are sorted by it, equal numbers by id.
    """
    if not shuffle:
        return range(num_samples)
    key = np.uint64(mix(_ORDER_PURPOSE, seed, epoch))
    ranks = _mix_vector(np.arange(num_samples, dtype=np.uint64), key)
    return array.array("q", np.argsort(ranks, kind="stable").astype(np.int64).tobytes())


def _mix_vector(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Mix each 64-bit value with the key; wraps around on purpose, and is one to one for a fixed key."""
    state = (values * np.uint64(_GAMMA)) ^ key
    for _ in range(2):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MULTIPLY_A)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MULTIPLY_B)
        state = state ^ (state >> np.uint64(31)) ^ key
    return state


def num_steps(num_samples: int, batch_size: int, drop_last: bool = False) -> int:
    """Count the optimizer steps of an epoch; without ``drop_last`` the last one may be short."""
    _check_sizes(num_samples, batch_size)
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def step_ids(order: Sequence[int], step: int, batch_size: int) -> list[int]:
    """Give the ids of one step of an epoch, in order; fewer than ``batch_size`` in a short last step."""
    return list(order[step * batch_size : (step + 1) * batch_size])


def locate(position_samples: int, *, num_samples: int, batch_size: int, drop_last: bool = False) -> Position:
    """Find the next step of a run that has trained on ``position_samples`` samples since its start.

    At the end of an epoch this is step 0 of the next one.

    Raises:
        DataError: the count lies inside a step, so it was reached with another batch size or other data.
    """
    _check_sizes(num_samples, batch_size)
    steps = num_steps(num_samples, batch_size, drop_last)
    if steps == 0:
        raise DataError(
            f"drop_last leaves no step: {num_samples} samples are fewer than batch_size={batch_size}; "
            f"use a batch_size of at most {num_samples}, or drop_last=False."
        )
    epoch, inside = divmod(position_samples, min(num_samples, steps * batch_size))
    step, rest = divmod(inside, batch_size)
    if rest or position_samples < 0:
        raise DataError(
            f"{position_samples} samples trained on is not the start of a step for {num_samples} samples "
            f"with batch_size={batch_size}; go on with the batch_size and the data that the run began with."
        )
    return Position(epoch=epoch, step=step)


def _check_sizes(num_samples: int, batch_size: int) -> None:
    if num_samples < 0 or batch_size < 1:
        raise DataError(f"needs num_samples >= 0 and batch_size >= 1, got {num_samples} and {batch_size}.")
