"""One device against a plain loop, and two replicas against DDP, exact and fast."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from meshwise.launch.local import run_ranks

from .measure import Effort, Row, interleave
from .models import CASES, Case, Data
from .ours import ours
from .peers import ddp_loop, plain_loop

Seconds = dict[str, tuple[float, ...]]
PARTS = 3  # microbatches a replica in the second comparison of exact and fast


def make_data(case: Case) -> Data:
    """Make a case's data, the same on every rank."""
    torch.manual_seed(1)
    return case.data(case.num_samples)


def one_device(names: list[str], effort: Effort) -> list[Row]:
    """Compare one device with a plain loop, one microbatch a step."""
    rows = []
    for name in names:
        found = run_ranks(partial(_one_device, name, effort), 1, timeout=1800)[0]
        rows.append(_row("one-device", name, found, "dp=1", "plain loop", 1.03))
    return rows


def _one_device(name: str, effort: Effort, context: Any) -> Seconds:
    case = CASES[name]
    data = make_data(case)
    return interleave(
        {
            "dp=1": ours(case, data, "dp=1", batch=case.batch, microbatch=case.batch),
            "plain loop": plain_loop(case, data),
        },
        effort,
    )


def replicas(names: list[str], effort: Effort) -> list[Row]:
    """Compare two replicas with DDP, and the exact reduction with the backend's own order."""
    rows = []
    for name in names:
        found = run_ranks(partial(_replicas, name, effort), 2, timeout=1800)[0]
        rows.append(_row("dp", name, found, "dp=2", "DDP", 1.00))
        rows.append(_row("exactness", name, found, "dp=2", "dp=2 fast", 1.05))
        rows.append(_row("exactness", name, found, "dp=2 in parts", "dp=2 in parts fast", 1.05))
    return rows


def _replicas(name: str, effort: Effort, context: Any) -> Seconds:
    """Measure DDP and meshwise on the same batch a rank; "in parts" cuts it in 3 microbatches a rank."""
    case = CASES[name]
    data = make_data(case)
    batch = 2 * case.batch
    part = max(1, case.batch // PARTS)
    found = interleave(
        {
            "dp=2": ours(case, data, "dp=2", batch=batch, microbatch=case.batch),
            "DDP": ddp_loop(case, data),
            "dp=2 fast": ours(case, data, "dp=2,reduction=fast", batch=batch, microbatch=case.batch),
        },
        effort,
    )
    size = 2 * PARTS * part
    parted = {
        f"dp=2 in parts{end}": ours(case, data, f"dp=2{layout}", batch=size, microbatch=part)
        for end, layout in (("", ""), (" fast", ",reduction=fast"))
    }
    return found | interleave(parted, effort)


def _row(part: str, case: str, found: Seconds, ours: str, theirs: str, target: float) -> Row:
    return Row(
        part=part,
        case=case,
        meshwise=ours,
        alternative=theirs,
        seconds=found[ours],
        alternative_seconds=found[theirs],
        target=target,
    )
