"""Packets between the stages of one replica: sent as soon as made, receives posted ahead."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ..parallel.packet import Courier, PostedPacket
from ..schedule.actions import Action, Op
from .cells import Values

if TYPE_CHECKING:
    from .engine import Engine

LOOKAHEAD = 3
RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)


class Messages:
    """Send and receive what crosses from stage to stage; reset by :meth:`begin` at each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.courier = Courier(engine.transport, engine.device)
        self.posted: dict[Action, PostedPacket | None] = {}

    def begin(self) -> None:
        """Forget the packets of the step before."""
        self.posted = {}

    def _route(self, action: Action) -> tuple[int, int, Any]:
        """Give the peer, the tag and the packet's kind of a send or receive."""
        m = self.engine.local[action.microbatch]
        key = self.engine.capture(m)[0]
        stage = action.stage
        up = action.op in (Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION)
        boundary = stage if action.op in (Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT) else stage + 1
        sending = action.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
        other = boundary if (up == sending) else boundary - 1
        peer = self.engine.mesh.stage_rank(other, dp=self.engine.dp_index)
        tag = (boundary * 8192 + action.microbatch) * 2 + (0 if up else 1)
        return peer, tag, (up, boundary, self.engine.batch.sizes[m], key, self.engine.trainable)

    def send(self, action: Action, values: Values) -> None:
        """Send a stage's outputs up, or its input gradients down."""
        peer, tag, key = self._route(action)
        self.courier.send(values, peer, tag, key, static=self.engine.staged.static)

    def receive(self, action: Action) -> Generator[None, None, Values]:
        """Wait for a stage's inputs, or for its output gradients."""
        posted = self.posted.pop(action, None)
        if posted is not None:
            return (yield from posted.finish())
        peer, tag, key = self._route(action)
        return (yield from self.courier.receive(peer, tag, key, static=self.engine.staged.static))

    def post_ahead(self, at: int) -> None:
        """Post the next receives, so that data can arrive while cells run."""
        program = self.engine.program
        for action in program[at + LOOKAHEAD - 1 : at + LOOKAHEAD] if at else program[:LOOKAHEAD]:
            if action.op in RECEIVES:
                peer, tag, key = self._route(action)
                self.posted[action] = self.courier.post(peer, tag, key, static=self.engine.staged.static)
