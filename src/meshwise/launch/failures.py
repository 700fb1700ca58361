"""What went wrong in a rank, which of several failures came first, and the exception that says so."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from meshwise.errors import LaunchError, MeshwiseError, RankError

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "peer closed",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Hold one rank's failure. ``seconds`` is the host's monotonic clock; ``kind`` is empty for a death."""

    rank: int
    seconds: float
    kind: str = ""
    message: str
    details: str = ""
    pickled: bytes | None = None
    secondary: bool = False

    def __str__(self) -> str:
        what = f": {self.kind}: " if self.kind else " "
        return f"rank {self.rank}{what}{self.message}"


def describe(rank: int, error: BaseException, seconds: float, pickled: bytes | None) -> Failure:
    """Describe an exception in the rank that it was raised in."""
    if isinstance(error, SystemExit):
        return Failure(rank=rank, seconds=seconds, message=_left(_exit_code(error)), details=_text(error))
    return Failure(
        rank=rank,
        seconds=seconds,
        kind=type(error).__name__,
        message="\n".join([str(error), *getattr(error, "__notes__", ())]),
        details=_text(error),
        pickled=pickled,
        secondary=lost_peer(error),
    )


def death(rank: int, exit_code: int | None, seconds: float) -> Failure:
    """Describe the end of a rank that reported nothing; a negative code is a signal's number."""
    if exit_code is not None and exit_code < 0:
        message = f"was ended by signal {-exit_code}{_signal_name(-exit_code)}"
    else:
        message = _left(exit_code)
    return Failure(rank=rank, seconds=seconds, message=message)


def _left(exit_code: int | None) -> str:
    return f"left with exit code {exit_code} before the job was finished"


def _exit_code(error: SystemExit) -> int:
    """Read a code as the interpreter does: nothing is 0, a text is 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    return 1


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def _text(error: BaseException) -> str:
    """Format the traceback without the launcher's own frame at its top."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, below)).rstrip()


def lost_peer(error: BaseException | None) -> bool:
    """Say whether an exception, or what it was raised from, only tells that another rank is gone."""
    while error is not None:
        if any(sign in str(error).lower() for sign in _LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False


def first(failures: Iterable[Failure]) -> Failure:
    """Pick the failure to show: the earliest one, but a lost connection only where nothing explains it."""
    return min(failures, key=lambda failure: (failure.secondary, failure.seconds))


def raise_failure(failure: Failure, returned: Sequence[int]) -> NoReturn:
    """Raise a rank's failure here: as its own type if it is meshwise's, else as a RankError.

    ``returned`` are the ranks that had finished by then: a connection lost to one of them is their doing.
    """
    original = _original(failure)
    if isinstance(original, MeshwiseError):
        raise _prefixed(original, failure) from None
    rank, head = failure.rank, str(failure)
    if failure.secondary and returned:
        rank, head = returned[0], f"{_deserted(failure, returned)}\n{head}"
    message = f"{head}\n\n{failure.details}" if failure.details else head
    raise RankError(message, rank=rank, details=failure.details) from original


def _deserted(failure: Failure, returned: Sequence[int]) -> str:
    """Name the ranks that left the others waiting: they did not fail, yet nothing else explains it."""
    names = ", ".join(str(rank) for rank in returned)
    return f"rank {names} returned while rank {failure.rank} was still waiting for an exchange with it"


def _original(failure: Failure) -> BaseException | None:
    from meshwise.launch import ship  # torch comes with it, and the rest of this file needs none

    return ship.loads(failure.pickled) if failure.pickled is not None else None


def _prefixed(error: MeshwiseError, failure: Failure) -> MeshwiseError:
    """Put the rank in front of the message and the rank's traceback behind it as a note."""
    error.args = (f"rank {failure.rank}: {failure.message}", *error.args[1:])
    if failure.details and hasattr(error, "add_note"):
        error.add_note(failure.details)
    return error


def raise_timeout(unfinished: Sequence[int], timeout: float, num_ranks: int) -> NoReturn:
    """Raise LaunchError for a job that took too long, naming the ranks that had not finished."""
    names = ", ".join(str(rank) for rank in unfinished)
    raise LaunchError(
        f"the job was stopped after {timeout:g} seconds with {len(unfinished)} of {num_ranks} ranks "
        f"unfinished (rank {names}); allow a longer timeout, or find the exchange that one rank never enters"
    )
