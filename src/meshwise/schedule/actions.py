"""The actions of one training step: what a rank does, as plain values.

::

    rank 0   F0.0  S>0.0  F0.1  S>0.1  R<0.0  B0.0  R<0.1  B0.1        reduce  clip  update
    rank 1   R>1.0  F1.0  B1.0  S<1.0  R>1.1  F1.1  B1.1  S<1.1        reduce  clip  update
               |      '-- FORWARD of stage 1 on microbatch 0
               '-- RECEIVE_ACTIVATION: the input of stage 1 for microbatch 0
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Op(enum.Enum):
    """Name a kind of action; the value is its short form in print."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "S>"
    RECEIVE_ACTIVATION = "R>"
    SEND_GRADIENT = "S<"
    RECEIVE_GRADIENT = "R<"
    COUPLE_FORWARD = "C>"
    COUPLE_BACKWARD = "C<"
    REDUCE = "reduce"
    CLIP = "clip"
    UPDATE = "update"

    # Members are singletons, so identity is a right hash, and much faster than the default.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """Say one thing that one rank does; which rank, is said by the program that holds it.

    * ``SEND_ACTIVATION``: sends the output of ``stage`` to stage + 1; never blocks.
    * ``RECEIVE_ACTIVATION``: waits for the input of ``stage``, from stage - 1.
    * ``SEND_GRADIENT``: sends the gradient of the input of ``stage`` to stage - 1; never blocks.
    * ``RECEIVE_GRADIENT``: waits for the gradient of the output of ``stage``, from stage + 1.
    * ``COUPLE_FORWARD``: the barrier after FORWARD of ``segment`` on all microbatches.
    * ``COUPLE_BACKWARD``: the same barrier, crossed backward, after BACKWARD of ``segment`` + 1 on all
      microbatches (of the loss, when ``segment`` is the last of the last stage).
    * ``REDUCE``, ``CLIP``, ``UPDATE``: once a step and rank, without stage and microbatch.
    """

    op: Op
    stage: int = -1  # global stage index; -1 where it has no meaning
    microbatch: int = -1  # 0..M-1 within this replica; -1 where it has no meaning
    segment: int = 0  # within the stage; a stage without coupled rows has only segment 0

    def __str__(self) -> str:
        """Print the short form: ``F1.3``, ``F1.3/2`` (segment 2), ``C>1/0``, ``reduce``."""
        if self.op in COUPLES:
            return f"{self.op.value}{self.stage}/{self.segment}"
        if self.stage < 0:
            return self.op.value
        suffix = f"/{self.segment}" if self.segment else ""
        return f"{self.op.value}{self.stage}.{self.microbatch}{suffix}"


Program = tuple[tuple[Action, ...], ...]
"""What each rank of one pipeline does in one step: one tuple of actions for each pp rank."""

SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT})
COUPLES = frozenset({Op.COUPLE_FORWARD, Op.COUPLE_BACKWARD})
CELLS = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})

_MATCH = {
    Op.SEND_ACTIVATION: (Op.RECEIVE_ACTIVATION, 1),
    Op.RECEIVE_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECEIVE_GRADIENT, -1),
    Op.RECEIVE_GRADIENT: (Op.SEND_GRADIENT, 1),
}


def matching(action: Action) -> Action:
    """Return the receive that belongs to a send, or the send that belongs to a receive."""
    op, step = _MATCH[action.op]
    return Action(op, action.stage + step, action.microbatch)


def rank_of_stage(stage: int, num_ranks: int) -> int:
    """Return the pp rank that holds a stage (looped placement: 0, 1, .., p-1, 0, 1, ..)."""
    return stage % num_ranks
