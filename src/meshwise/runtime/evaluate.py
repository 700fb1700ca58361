"""Evaluation: every sample exactly once, metrics from states folded in sample order."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ..data.loader import MicrobatchLoader
from ..grid import microbatch_sizes, split_evenly
from ..parallel.transport import wait_for
from .engine import hand_over, rebuild_output
from .losses import loss_of, target_of
from .step import StepBatch
from .worker import Worker, move

Steps = Generator[None, None, Any]


class Metrics:
    """Hold the job's metrics: torchmetrics objects, or functions ``metric(output, target) -> number``."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def measure(self, output: Any, data: Any) -> dict[str, Any]:
        """Measure one microbatch: a torchmetrics state, or a number."""
        found: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            if not hasattr(metric, "update"):
                found[name] = float(metric(output, target_of(data)))
                continue
            metric.reset()
            metric.update(_first_tensor(output), target_of(data))
            found[name] = {key: _copy(getattr(metric, key)) for key in metric._defaults}
        return found

    def combine(self, rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, float]:
        """Fold the microbatches' states in order; ``rows`` holds (samples, measured) of each."""
        total = sum(n for n, _ in rows)
        result = {}
        for name, metric in self.metrics.items():
            if not hasattr(metric, "update"):
                result[name] = sum(n * row[name] for n, row in rows) / total
                continue
            metric.reset()
            for key, reduce in metric._reductions.items():
                setattr(metric, key, _fold([row[name][key] for _, row in rows], reduce))
            metric._update_count = len(rows)
            metric.sync_on_compute = False
            result[name] = float(metric.compute())
        return result


def _copy(value: Any) -> Any:
    return [v.detach().clone() for v in value] if isinstance(value, list) else value.detach().clone()


def _fold(values: list[Any], reduce: Any) -> Any:
    if isinstance(values[0], list):
        return [t for value in values for t in value]
    name = getattr(reduce, "__name__", "")
    if "sum" in name:
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total
    if "cat" in name:
        return torch.cat([v.reshape(1) if v.ndim == 0 else v for v in values])
    stacked = torch.stack(values)
    return reduce(stacked) if reduce is not None else stacked


def _first_tensor(output: Any) -> Any:
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def evaluate(worker: Worker, data: Any) -> Generator[None, None, dict[str, float]]:
    """Evaluate the model on ``data``: mean loss, the job's metrics, and the number of samples. Every rank calls it.

    Microbatches are split over replicas, never padded; each sample counts once.
    """
    loader = MicrobatchLoader(data, seed=worker.job.seed)
    count = loader.num_samples
    samples: list[Any] = []
    if count is None:
        samples = [s for batch in loader.iterate(0, worker.job.batch_size) for s in batch]
        count = len(samples)
    if count == 0:
        return {"num_samples": 0.0}
    sizes = microbatch_sizes(count, worker.job.microbatch)
    low, high = split_evenly(len(sizes), worker.layout.dp)[worker.engine.dp_index]
    modes = [(module, module.training) for module in worker.model.modules()]
    worker.model.eval()
    worker.book.refresh()
    try:
        rows = yield from _run_microbatches(
            worker, _eval_batch(worker, loader, sizes, samples), range(low, high)
        )
    finally:
        for module, training in modes:
            module.training = training
    members = yield from wait_for(worker.transport.all_gather_object(rows, worker.engine.world))
    ordered = sorted((row for member in members for row in member), key=lambda row: row[0])
    return _summarize(worker, ordered)


def _eval_batch(
    worker: Worker, loader: MicrobatchLoader, sizes: tuple[int, ...], samples: list[Any]
) -> StepBatch:
    def load(m: int) -> Any:
        start = sum(sizes[:m])
        ids = range(start, start + sizes[m])
        data = loader.collate(0, ids, [samples[i] for i in ids]) if samples else loader.fetch(0, ids)
        return move(data, worker.device, worker.job.precision)

    return StepBatch(sizes=sizes, load=load)


def _run_microbatches(worker: Worker, batch: StepBatch, local: range) -> Steps:
    engine = worker.engine
    metrics = Metrics(dict(worker.job.metrics))
    rows = []
    for m in local:
        data = batch.load(m)
        output = yield from forward_only(worker, data, batch.sizes[m], m)
        if engine.my_stages[-1] == worker.layout.num_stages - 1:
            rows.append(_measure(worker, metrics, m, batch.sizes[m], output, data))
    engine.transport.flush()
    return rows


def _measure(worker: Worker, metrics: Metrics, m: int, size: int, output: Any, data: Any) -> Any:
    with torch.no_grad():
        loss = float(loss_of(worker.job)(output, data))
        weigher = worker.weigher
        weight = weigher.measure(data) if weigher.needs_data else float(size)
        return (m, size, loss, weight, metrics.measure(output, data))


def _summarize(worker: Worker, rows: list[Any]) -> dict[str, float]:
    total = sum(weight for _, _, _, weight, _ in rows)
    if worker.weigher.kind == "sum":
        loss = sum(row[2] for row in rows)
    else:
        loss = sum(row[2] * row[3] for row in rows if row[3]) / total if total else 0.0
    found = Metrics(dict(worker.job.metrics)).combine([(row[1], row[4]) for row in rows])
    return {"loss": loss, **found, "num_samples": float(sum(row[1] for row in rows))}


def forward_only(worker: Worker, data: Any, size: int, m: int) -> Steps:
    """Run one microbatch through all stages without gradients; gives the output on the last stage's rank."""
    engine, layout = worker.engine, worker.layout
    key, staged = worker.book.staged(data, coupled=False)
    states = engine.stages_for(key, staged)
    values: Any = ()
    for stage in engine.my_stages:
        if stage > 0 and (stage - 1) % layout.pp != engine.pp_index:
            peer = engine.mesh.stage_rank(stage - 1, dp=engine.dp_index)
            values = yield from engine.courier.receive(
                peer, (stage * 8192 + m % 8192) * 2, ("eval", stage), static=False
            )
        states[stage].begin({})
        for k in range(len(staged.stages[stage])):
            with torch.no_grad(), engine.book.autocast():
                cell = states[stage].forward(
                    k,
                    worker.book.inputs(data),
                    values,
                    batch=size,
                    seed=engine.seeder(m),
                    rows=None,
                    key=(m, k),
                )
            values = hand_over(cell.gives)
        if stage < layout.num_stages - 1 and (stage + 1) % layout.pp != engine.pp_index:
            peer = engine.mesh.stage_rank(stage + 1, dp=engine.dp_index)
            tag = ((stage + 1) * 8192 + m % 8192) * 2
            engine.courier.send(cell.gives, peer, tag, ("eval", stage + 1), static=False)
    if engine.my_stages[-1] != layout.num_stages - 1:
        return None
    return rebuild_output(staged, cell.gives, cell.whole, worker.book.inputs(data))
