"""Messages and sums between two ranks, over meshwise's own transport and over gloo.

A step of a message contender is a round: a message there and one back, so half of it is one way. Every message
is sent from ordinary memory and arrives as a tensor that can be read; the last one of a run is checked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.layout import Layout
from meshwise.parallel import packet
from meshwise.parallel.transport import wait_for
from meshwise.runtime.worker import drive
from meshwise.session import make_transport

from .contender import Contender

CPU = torch.device("cpu")


def floats(contender: Contender) -> Tensor:
    """Make the floats of a message, its bytes as the contender says."""
    return torch.full((contender.options["bytes"] // 4,), float(dist.get_rank()))


def check(found: Tensor, value: float) -> None:
    """Refuse what did not arrive whole."""
    if not bool((found == value).all()):
        raise RuntimeError("a message did not arrive as it was sent")


class Courier:
    """Exchange messages as the stages of a pipeline do, each way under a tag of its own."""

    def __init__(self, contender: Contender) -> None:
        self.rank, self.other = dist.get_rank(), 1 - dist.get_rank()
        self.courier: Any = packet.Courier(make_transport(Layout(pp=2), self.rank, CPU), CPU)
        self.mine = floats(contender)

    def run(self, steps: int) -> None:
        """Send so many messages there and back."""
        found: tuple[Tensor, ...] = ()
        for _ in range(steps):
            if self.rank == 0:
                self._send()
            found = drive(self.courier.receive(self.other, self.other, "message", static=True))
            if self.rank == 1:
                self._send()
        check(found[0], float(self.other))
        self.courier.transport.flush()

    def _send(self) -> None:
        self.courier.send((self.mine,), self.other, self.rank, "message", static=True)


class Gloo:
    """Exchange messages with ``torch.distributed.send`` and ``recv`` into a tensor made beforehand."""

    def __init__(self, contender: Contender) -> None:
        self.rank, self.other = dist.get_rank(), 1 - dist.get_rank()
        self.mine = floats(contender)
        self.theirs = torch.empty_like(self.mine)

    def run(self, steps: int) -> None:
        """Send so many messages there and back."""
        for _ in range(steps):
            for sender in (0, 1):
                if self.rank == sender:
                    dist.send(self.mine, self.other)
                else:
                    dist.recv(self.theirs, self.other)
        check(self.theirs, float(self.other))


class Sum:
    """Add up a tensor over two ranks with the transport's all-reduce."""

    def __init__(self, contender: Contender) -> None:
        self.transport = make_transport(Layout(dp=2), dist.get_rank(), CPU)
        self.flat = torch.zeros_like(floats(contender))

    def run(self, steps: int) -> None:
        """Add up so many times, the last time ones."""
        for step in range(steps):
            if step == steps - 1:
                self.flat.fill_(1.0)
            drive(wait_for(self.transport.all_reduce(self.flat, (0, 1))))
        check(self.flat, 2.0)
        self.flat.zero_()


class GlooSum:
    """Add up a tensor over two ranks with ``torch.distributed.all_reduce``."""

    def __init__(self, contender: Contender) -> None:
        self.flat = torch.zeros_like(floats(contender))

    def run(self, steps: int) -> None:
        """Add up so many times, the last time ones."""
        for step in range(steps):
            if step == steps - 1:
                self.flat.fill_(1.0)
            dist.all_reduce(self.flat)
        check(self.flat, 2.0)
        self.flat.zero_()
