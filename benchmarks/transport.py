"""Messages between two ranks: how long the smallest takes, how fast large ones and sums go; gloo beside."""

from __future__ import annotations

from collections.abc import Iterator

from .contender import Contender
from .measure import Effort, Result, Row
from .turns import compete

KIB, MIB = 1 << 10, 1 << 20
LARGE = (1, 4, 16)  # MiB
SIDES = {"meshwise": "meshwise", "gloo": "torchrun"}  # and how its ranks are launched


def transport(effort: Effort) -> Iterator[Row]:
    """Measure messages of 1 KiB to 16 MiB one way, and a sum of 4 MiB over both ranks."""
    sizes = [KIB, *(size * MIB for size in LARGE)]
    sums = [_contender(side, "sum", 4 * MIB) for side in SIDES]
    contenders = [_contender(side, "message", size) for size in sizes for side in SIDES] + sums
    found = compete(contenders, effort)
    for contender in contenders:
        yield _row(contender, found[contender.name])


def _contender(side: str, what: str, size: int) -> Contender:
    text = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    return Contender(
        name=f"{side}, {what} of {text}",
        kind=f"{side}-{what}",
        case=f"{what} of {text}",
        launch=SIDES[side],
        home=side,
        options={"bytes": size, "side": side, "what": what},
    )


def _row(contender: Contender, result: Result) -> Row:
    """Give microseconds one way for what is small, else GB/s: the bytes of one rank's tensor over the seconds."""
    rounds = 1 if contender.options["what"] == "sum" else 2  # a message's step is two of them
    size, mine = contender.options["bytes"], contender.options["side"] == "meshwise"
    small = size < MIB
    target = 20.0 if small else 5.0 if rounds == 1 else 8.0

    def value(seconds: float) -> float:
        return seconds / rounds * 1e6 if small else size / (seconds / rounds) / 1e9

    unit = "us" if small else "GB/s"
    best = f"best block {value(min(result.seconds)):.3g} {unit}" if result.seconds else ""
    return Row(
        part="transport",
        case=contender.case,
        name=contender.options["side"],
        value=None if result.median is None else value(result.median),
        unit=unit,
        target=target if mine else None,
        at_least=not small,
        seconds=result.seconds,
        note=result.note or best,
    )
