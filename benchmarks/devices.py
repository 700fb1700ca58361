"""One device beside a plain loop, and what more microbatches of the same batch cost on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cases import CASES
from .contender import Contender, meshwise
from .measure import Effort, Row
from .turns import compete

PLAIN = "plain loop"
MICROBATCHES = (1, 2, 4, 8)
TARGETS = {"mlp": 1.10}  # the others: 1.02


def one_device(names: Sequence[str], effort: Effort) -> Iterator[Row]:
    """Compare one device with a plain loop over whole batches: one microbatch a step, and more without a target."""
    for name in names:
        batch = CASES[name].batch
        counts = [count for count in MICROBATCHES if batch % count == 0]
        mine = {
            count: meshwise(f"meshwise, m={count}", name, "dp=1", ranks=1, batch=batch, microbatch=batch // count)
            for count in counts
        }
        plain = Contender(name=PLAIN, kind="plain", case=name, ranks=1, options={"batch": batch})
        found = compete([mine[1], plain, *(mine[count] for count in counts[1:])], effort)
        for count in counts:
            target = TARGETS.get(name, 1.02) if count == 1 else None
            yield Row.ratio("one-device", name, found, mine[count].name, PLAIN, target)
