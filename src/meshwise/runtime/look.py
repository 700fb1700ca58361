"""A look at the job before step 1: warnings about what spoils training without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..data.source import inspect_data
from ..grid import microbatch_sizes
from ..job import Job
from ..model.graph import Graph, Value
from ..model.stages import Staged
from ..tree import leaves

SOFTMAXES = ("softmax", "log_softmax")
RANK_WORDS = ("world_size", "get_world_size", "num_processes", "local_rank", "WORLD_SIZE")


def look(job: Job, model: nn.Module, staged: Staged) -> list[str]:
    """List warnings about a job, each with what to do. One rank suffices."""
    found = [*inspect_data(job.train_data, batch_size=job.batch_size)]
    found += _softmax_before_cross_entropy(job, staged.graph)
    found += _counts_ranks(job)
    found += _unused_parameters(model, staged)
    found += _tiny_batch_norm(job, staged.graph)
    found += _data_buffers(job, staged)
    return found


def _softmax_before_cross_entropy(job: Job, graph: Graph) -> list[str]:
    if not isinstance(job.loss, nn.CrossEntropyLoss) and job.loss is not nn.functional.cross_entropy:
        return []
    makers = {index: node for node in graph.nodes for _, index in node.outputs}
    for ref in leaves(graph.output):
        node = makers.get(ref.index) if isinstance(ref, Value) else None
        name = getattr(node.target, "__name__", "") if node is not None else ""
        if node is not None and name in SOFTMAXES:
            where = f'module "{node.module}"' if node.module else "the model"
            return [
                f"{where} ends in a {name}, and the loss (cross-entropy) takes a softmax itself: two in a row flatten "
                "the gradients and slow training down. Return the plain scores (logits)."
            ]
    return []


def _counts_ranks(job: Job) -> list[str]:
    found = []
    for name in ("scheduler", "optimizer", "forward"):
        words = _words(getattr(job, name))
        hits = sorted(set(RANK_WORDS) & words)
        if hits:
            found.append(
                f"{name}= uses {hits[0]!r}: it counts ranks. A step of a meshwise job is one step of the whole batch "
                "on any number of devices, so nothing needs to be scaled by them."
            )
    return found


def _words(function: Callable[..., Any] | None) -> set[str]:
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    texts = {c for c in code.co_consts if isinstance(c, str)}
    return {*code.co_names, *code.co_freevars, *texts}


def _unused_parameters(model: nn.Module, staged: Staged) -> list[str]:
    used = {p for unit in staged.units for p in unit.params}
    unused = [n for n, p in model.named_parameters() if n not in used and p.requires_grad]
    if not unused or staged.graph.blocked:
        return []
    more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    return [
        f'parameter "{unused[0]}"{more} is not used by the forward on the first batch: it gets no gradient and stays '
        "as it is. Remove it, or freeze it with requires_grad_(False)."
    ]


def _tiny_batch_norm(job: Job, graph: Graph) -> list[str]:
    rows = [n.module for n in graph.nodes if n.row is not None]
    sizes = microbatch_sizes(job.batch_size, job.microbatch)
    if not rows:
        return []
    if job.batch_norm == "microbatch" and min(sizes) < 8:
        return [
            f'BatchNorm "{rows[0]}" takes its statistics from microbatches of {min(sizes)} samples, which is noisy. '
            'Use batch_norm="batch" (statistics of the whole batch), or a larger microbatch_size.'
        ]
    if job.batch_norm == "batch" and job.batch_size < 8:
        return [
            f'BatchNorm "{rows[0]}" takes its statistics from a batch of {job.batch_size} samples, which is noisy.'
        ]
    return []


def _data_buffers(job: Job, staged: Staged) -> list[str]:
    if len(microbatch_sizes(job.batch_size, job.microbatch)) < 2:
        return []
    rows = {b.name for n in staged.graph.nodes if n.row for b in (n.row.running_mean, n.row.running_var) if b}
    names = sorted(staged.data_buffers - rows)
    opaque = {b for held in staged.graph.module_buffers.values() for b in held}
    names = [n for n in names if n not in opaque]
    if not names:
        return []
    return [
        f'buffer "{names[0]}" is changed from the data by code that cannot be combined over microbatches: each step '
        "keeps the value that its last microbatch leaves. Use one microbatch a step (microbatch_size=batch_size) if "
        "that is not meant."
    ]
