"""One process of the benchmarks: it makes the contenders that its command line names, and runs them when told.

``python -m benchmarks.rank ADDRESS CONTENDER...``, the contenders as JSON: all of one home. Rank and world size
come from torchrun's variables; where the home is meshwise's, this process starts the ranks as a user's script does.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from .contender import Contender, Runner

LIFE_SECONDS = 7200.0  # no home lives longer


def main() -> None:
    """Serve the contenders of one home until told to end."""
    address, *texts = sys.argv[1:]
    contenders = [Contender.from_json(text) for text in texts]
    first = contenders[0]
    if first.launch == "meshwise" and first.ranks > 1:
        from meshwise.launch.local import run_ranks

        run_ranks(partial(_serve_rank, address, contenders), first.ranks, threads=first.threads, timeout=LIFE_SECONDS)
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(first.threads)
    if first.ranks > 1:
        dist.init_process_group("gloo")
    serve(address, contenders, int(os.environ.get("RANK", "0")))
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve_rank(address: str, contenders: list[Contender], context: Any) -> None:
    serve(address, contenders, context.rank)


def serve(address: str, contenders: list[Contender], rank: int) -> None:
    """Do what comes over the line: make a contender, run steps of one, tell what it knows, end."""
    made: dict[str, Runner] = {}
    by_name = {c.name: c for c in contenders}

    def make(name: str) -> None:
        made[name] = by_name[name].make()

    def run(name: str, steps: int) -> float:
        start = time.perf_counter()
        made[name].run(steps)
        return time.perf_counter() - start

    def tell(name: str) -> Any:
        return made[name].tell()  # type: ignore[attr-defined]

    with Client(address) as line:
        line.send((contenders[0].place, rank))
        _listen(line, {"make": make, "run": run, "tell": tell})


def _listen(line: Connection, calls: dict[str, Callable[..., Any]]) -> None:
    """Answer each call with ("ok", value) or ("error", a line that says why)."""
    while True:
        try:
            call, *arguments = line.recv()
        except EOFError:  # the one who measures is gone
            return
        if call == "end":
            return
        try:
            line.send(("ok", calls[call](*arguments)))
        except ModuleNotFoundError as error:
            line.send(("error", f"not installed ({error.name})"))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its row in the table
            traceback.print_exc()
            line.send(("error", _reason(error)))


def _reason(error: Exception) -> str:
    """Say in one line what was raised and where."""
    text = " ".join(str(error).split()) or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"does not run: {type(error).__name__}: {text[:160]}{place}"


if __name__ == "__main__":
    from benchmarks import rank  # not this module by another name: ranks that meshwise starts import it

    rank.main()
