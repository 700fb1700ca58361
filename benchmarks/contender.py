"""Contenders: what runs, in how many processes, and which kinds there are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

# Where each kind is made: a function that takes the contender in each of its ranks and gives a Runner.
KINDS = {
    "meshwise": "ours.Ours",
    "plain": "loops.plain",
    "ddp": "loops.ddp",
    "zero": "loops.zero_redundancy",
    "fsdp": "loops.sharded",
    "accelerate": "peers.accelerate",
    "fabric": "peers.fabric",
    "deepspeed": "peers.DeepSpeed",
    "stock": "stock.StockPipeline",
    "meshwise-message": "messages.Courier",
    "meshwise-sum": "messages.Sum",
    "gloo-message": "messages.Gloo",
    "gloo-sum": "messages.GlooSum",
}


class Runner(Protocol):
    """State what a kind gives; it may also have ``tell()``, for what else is to be known after the blocks."""

    def run(self, steps: int) -> None:
        """Run so many steps."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """State one contender of a comparison.

    ``launch``: "meshwise" starts the ranks as meshwise starts them, with its settings of the process (one rank: a
    plain process); "torchrun" as torchrun does, with torch's and the C library's defaults. Contenders of one
    ``home`` live in the same processes. ``threads`` are those of each rank.
    """

    name: str
    kind: str
    case: str
    ranks: int = 2
    threads: int = 1
    launch: str = "torchrun"
    home: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Name the processes that it lives in."""
        return self.home or self.name

    def to_json(self) -> str:
        """Give the contender as text for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Contender:
        """Read what :meth:`to_json` gave."""
        return cls(**json.loads(text))

    def make(self) -> Runner:
        """Make what runs; called in each rank."""
        module, _, name = KINDS[self.kind].partition(".")
        made: Runner = getattr(importlib.import_module(f"benchmarks.{module}"), name)(self)
        return made


def meshwise(
    name: str,
    case: str,
    layout: str,
    *,
    ranks: int,
    batch: int,
    microbatch: int,
    cuts: tuple[int, ...] = (),
    home: str = "meshwise",
) -> Contender:
    """State a contender that trains with meshwise; ``batch`` counts the samples of a step over all ranks."""
    options = {"layout": layout, "batch": batch, "microbatch": microbatch, "cuts": list(cuts)}
    return Contender(name=name, kind="meshwise", case=case, ranks=ranks, launch="meshwise", home=home, options=options)
