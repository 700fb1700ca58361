"""Run contenders in turns, each in processes of its own, so that each has the settings that its users have.

::

    warm-up   A  B  C    A B C   C B A   A B C    blocks of steps; who is not running waits for its next turn

Noise that lasts longer than a round hits all alike, so ratios are steadier than seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .contender import Contender
from .measure import Effort, Result

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 240.0
STEP_SECONDS = 300.0
OTHERS_SECONDS = 10.0  # for the other ranks, after one has failed
END_SECONDS = 10.0
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Failed(Exception):
    """Say why a contender has no value."""


def compete(contenders: Sequence[Contender], effort: Effort) -> dict[str, Result]:
    """Measure all contenders in turns; the result of one that cannot run says why in its note."""
    with Arena(contenders) as arena:
        arena.make()
        steps = arena.warm_up(effort)
        found: dict[str, list[float]] = {name: [] for name in steps}
        for block in range(effort.blocks):
            for name in list(steps) if block % 2 == 0 else reversed(list(steps)):
                seconds = arena.run(name, steps[name])
                if seconds is not None:
                    found[name].append(seconds)
        return {
            c.name: Result(note=arena.notes[c.name])
            if c.name in arena.notes
            else Result(seconds=tuple(found[c.name]), told=arena.tell(c))
            for c in contenders
        }


class Arena:
    """Hold the processes of all contenders of one comparison; leaving ends them."""

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.contenders = {c.name: c for c in contenders}
        self.notes: dict[str, str] = {}
        self.homes: dict[str, Home] = {}

    def __enter__(self) -> Arena:
        self.desk = Desk()
        places = dict.fromkeys(c.place for c in self.contenders.values())
        self.homes = {p: Home([c for c in self.contenders.values() if c.place == p], self.desk) for p in places}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for home in self.homes.values():
            home.dismiss()
        for home in self.homes.values():
            home.end()
        self.desk.close()

    def make(self) -> None:
        """Let each contender make its model."""
        for name in self.contenders:
            self._ask(name, "make")

    def warm_up(self, effort: Effort) -> dict[str, int]:
        """Run the first steps of each contender, and give how many steps make a block of it."""
        steps = {}
        for name in self.contenders:
            seconds = self.run(name, effort.warm_steps)
            if seconds is not None and seconds < effort.seconds:  # else a block is one step, whatever it takes
                seconds = self.run(name, 2)
            if seconds is not None:
                steps[name] = max(1, round(effort.seconds / seconds))
        return steps

    def run(self, name: str, steps: int) -> float | None:
        """Give the seconds a step of the slowest rank, or None for a contender that has failed."""
        found = self._ask(name, "run", steps)
        return None if found is None else max(found) / steps

    def tell(self, contender: Contender) -> Any:
        """Give what each rank of a contender has to tell besides, for those asked to."""
        return self._ask(contender.name, "tell") if contender.options.get("tell") else None

    def _ask(self, name: str, *message: Any) -> list[Any] | None:
        if name in self.notes:
            return None
        call, *arguments = message
        try:
            return self.homes[self.contenders[name].place].ask(call, name, *arguments)
        except Failed as failure:
            self.notes[name] = str(failure)
            return None


class Home:
    """Hold the processes that some contenders live in."""

    def __init__(self, contenders: Sequence[Contender], desk: Desk) -> None:
        first = contenders[0]
        self.name, self.ranks, self.desk = first.place, first.ranks, desk
        self.lines: list[Connection] = []
        self.log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end()
        command = [sys.executable, "-m", "benchmarks.rank", desk.address, *(c.to_json() for c in contenders)]
        self.processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=self.log, stderr=self.log, text=True, start_new_session=True
            )
            for env in _environments(first)
        ]

    def ask(self, *message: Any) -> list[Any]:
        """Call all ranks and give their answers; raise Failed when one fails or none comes in time."""
        self._meet()
        answers: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + STEP_SECONDS
        try:
            for line in self.lines:
                line.send(message)
            while len(answers) < self.ranks:
                waiting: dict[Any, int] = {self.lines[r]: r for r in range(self.ranks) if r not in answers}
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:  # where one rank has failed, the others may wait for it for ever
                    self._fail(errors[0] if errors else f"does not run: no answer in {STEP_SECONDS:.0f} s")
                for line in ready:
                    state, answers[waiting[line]] = self.lines[waiting[line]].recv()
                    if state == "error":
                        errors.append(answers[waiting[line]])
                        deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        except (EOFError, OSError):
            self._fail(errors[0] if errors else f"does not run: a process ended: {self._last_line()}")
        if errors:
            raise Failed(errors[0])
        return [answers[rank] for rank in range(self.ranks)]

    def _meet(self) -> None:
        """Wait until all ranks have called."""
        if self.lines:
            return
        deadline = time.monotonic() + START_SECONDS
        while len(self.desk.lines(self.name)) < self.ranks:
            if any(p.poll() not in (None, 0) for p in self.processes):
                self._fail(f"does not run: a process ended: {self._last_line()}")
            if time.monotonic() > deadline:
                self._fail(f"does not run: not there in {START_SECONDS:.0f} s")
            self.desk.changed.wait(0.2)
        found = self.desk.lines(self.name)
        self.lines = [found[rank] for rank in range(self.ranks)]

    def _fail(self, reason: str) -> None:
        """End the processes: ranks that wait for one another cannot go on."""
        self._kill()
        raise Failed(reason)

    def _last_line(self) -> str:
        self.log.flush()
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return lines[-1][:160] if lines else "no output"

    def dismiss(self) -> None:
        """Let all ranks end."""
        for line in self.lines:
            try:
                line.send(("end",))
            except OSError:
                continue

    def end(self) -> None:
        """Wait for the processes, and end what does not go by itself."""
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if self.lines else 0.0)
            except subprocess.TimeoutExpired:
                continue
        self._kill()
        for line in self.lines:
            line.close()
        self.log.close()

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Desk:
    """Take in the lines of all ranks as they call."""

    def __init__(self) -> None:
        self._listener = Listener(backlog=64)
        self._found: dict[str, dict[int, Connection]] = {}
        self.changed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Give where ranks call."""
        return str(self._listener.address)

    def lines(self, place: str) -> dict[int, Connection]:
        """Give the lines of the ranks of one home that have called."""
        self.changed.clear()
        return dict(self._found.get(place, {}))

    def close(self) -> None:
        """Take no more calls."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                line = self._listener.accept()
                place, rank = line.recv()
            except EOFError:
                continue
            except OSError:  # closed
                return
            self._found.setdefault(place, {})[rank] = line
            self.changed.set()


def _environments(first: Contender) -> list[dict[str, str]]:
    """Give the environment of each process to start: torchrun's, or a user's shell where meshwise starts the ranks."""
    plain = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        plain[variable] = str(first.threads)
    # as in an activated environment: what a peer calls by name (DeepSpeed: ninja) is beside python
    plain["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), plain.get("PATH", "")])
    if first.ranks == 1 or first.launch == "meshwise":
        return [plain]
    shared = {
        "WORLD_SIZE": str(first.ranks),
        "LOCAL_WORLD_SIZE": str(first.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
    return [plain | shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(first.ranks)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
