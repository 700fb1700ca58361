"""What the report tests share: a plain one-process loop (the oracle), and meshwise in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from meshwise.job import Job
from meshwise.layout import Layout
from meshwise.parallel.transport import Mailroom, MemoryTransport
from meshwise.runtime.build import build_model
from meshwise.runtime.losses import call_forward, loss_of
from meshwise.runtime.step import StepResult
from meshwise.runtime.worker import Worker, drive_together

CPU = torch.device("cpu")
TOLERANCE = 1e-10
REPLICAS = ("dp=1", "dp=2", "dp=3", "dp=4", "dp=2,recompute=true")
PIPELINES = (
    "pp=2,schedule=gpipe",
    "pp=2",
    "pp=2,schedule=zero-bubble",
    "pp=2,recompute=true",
    "dp=2,pp=2",
    "dp=3,pp=2,schedule=gpipe",
)
ON_HOSTS = {"dp=3": (1,), "dp=2,pp=2": (1,), "dp=4": (2,)}  # layouts that are also tried on hosts of so many ranks
MIXES = REPLICAS + PIPELINES
Between = Callable[[list[nn.Module], int], None]  # (the models of all ranks, steps done)


@dataclass(kw_only=True)
class Run:
    """Hold what a run gave: numbers a step, and the tensors as they stand after the last step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    @property
    def lr(self) -> float:
        """Give the learning rate in force, the same on all ranks."""
        rates = {w.engine.optimizer.param_groups[0]["lr"] for w in self.workers if w.engine.optimizer}
        assert len(rates) == 1
        return float(rates.pop())


class Scale(nn.Module):
    """Multiply by one weight of shape (); the smallest unit a pipeline can cut."""

    def __init__(self, value: float, trainable: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64), requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def squares(output: Tensor, target: Tensor) -> Tensor:
    """Add up the squared differences."""
    return ((output - target) ** 2).sum()


def mean_squares(output: Tensor, target: Tensor) -> Tensor:
    """Take the mean of the squared differences."""
    return ((output - target) ** 2).mean()


def sgd(lr: float = 0.01, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Give a job's ``optimizer=``."""
    return lambda params: torch.optim.SGD(params, lr=lr, **options)


def adamw(lr: float = 0.01, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Give a job's ``optimizer=``."""
    return lambda params: torch.optim.AdamW(params, lr=lr, **options)


def column(*numbers: float) -> Tensor:
    """Give samples of one feature each."""
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1)


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    """Give normal float64 numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_job(model: Any, data: Any, **fields: Any) -> Job:
    """Make a job whose samples come in the order of ``data``: the batches of a plain loop."""
    given = {"loss": mean_squares, "optimizer": sgd(), "shuffle": False, **fields}
    return Job(model=model, train_data=data, **given)


# ---- the oracle ------------------------------------------------------------------------------------


def plain_batches(job: Job) -> Iterator[Any]:
    """Give the whole batches of a job epoch after epoch, each collated at once."""
    loader = isinstance(job.train_data, DataLoader)
    data = job.train_data.dataset if loader else job.train_data
    collate = job.train_data.collate_fn if loader else default_collate
    while True:
        for start in range(0, len(data), job.batch_size):
            yield collate([data[i] for i in range(start, min(start + job.batch_size, len(data)))])


def train_plainly(
    job: Job, steps: int = 3, *, batches: Sequence[Any] | None = None, between: Between | None = None
) -> Run:
    """Train as one process does without meshwise: the whole batch at once, autograd, clip, step."""
    model = build_model(job, CPU).train()
    optimizer = job.optimizer(list(model.parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    forward, loss_function = call_forward(job, _names(model)), loss_of(job)
    run = Run()
    source = iter(batches) if batches is not None else plain_batches(job)
    for step in range(len(batches) if batches is not None else steps):
        if between:
            between([model], step)
        batch = next(source)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(forward(model, batch), batch)
        loss.backward()
        run.norms.append(_clip(job, model))
        optimizer.step()
        if scheduler:
            scheduler.step()
        run.losses.append(float(loss.detach()))
    run.params = {n: p.detach() for n, p in model.named_parameters()}
    run.grads = {n: p.grad for n, p in model.named_parameters()}
    run.buffers = dict(model.named_buffers())
    return run


def _names(model: nn.Module) -> list[str] | None:
    from meshwise.runtime.book import forward_names

    return forward_names(model)


def _clip(job: Job, model: nn.Module) -> float | None:
    if job.clip_grad_norm is None:
        return None
    norm = nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm, norm_type=job.clip_norm_type)
    return float(norm)


# ---- meshwise in memory ------------------------------------------------------------------------------


def make_workers(job: Job, layout: str, *, per_host: int | None = None) -> list[Worker]:
    """Make the ranks of a layout in this process; ``job.model`` is a function, so that each has its own."""
    chosen, room = Layout.parse(layout), Mailroom(per_host=per_host)
    return [Worker(job, chosen, MemoryTransport(r, room), CPU) for r in range(chosen.num_devices)]


def train_in_memory(
    job: Job,
    layout: str = "dp=1",
    steps: int = 3,
    *,
    batches: Sequence[Any] | None = None,
    between: Between | None = None,
    per_host: int | None = None,
) -> Run:
    """Train ``job`` under ``layout`` in this process; every rank must end with the same bits.

    ``batches`` are global batches that the user brings. ``between(models, step)`` runs before each step.
    ``per_host`` ranks share memory; those of different hosts exchange messages.
    """
    run = Run(workers=make_workers(job, layout, per_host=per_host))
    if batches is None:
        sources = [_all_batches(w) for w in run.workers]
    else:
        sources = [(w.split_batch(b) for b in batches) for w in run.workers]
    for step in range(len(batches) if batches is not None else steps):
        if between:
            between([w.model for w in run.workers], step)
        each = [next(source) for source in sources]
        found = drive_together([w.step(b) for w, b in zip(run.workers, each, strict=True)])
        assert all(repr(r) == repr(found[0]) for r in found), "ranks report different results"
        run.results.append(found[0])
        run.losses.append(found[0].loss)
        run.norms.append(found[0].grad_norm)
    _read_tensors(run)
    return run


def _all_batches(worker: Worker) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from worker.batches(epoch)
        epoch += 1


def _read_tensors(run: Run) -> None:
    """Read parameters, gradients and buffers from the ranks that hold them, which must agree."""
    for worker in run.workers:
        for name, parameter in worker.model.named_parameters():
            if name in worker.held:
                _put(run.params, name, parameter.detach())
                _put(run.grads, name, parameter.grad)
        for name, buffer in worker.model.named_buffers():
            if worker.owner(name) == worker.engine.pp_index:
                _put(run.buffers, name, buffer)


def _put(found: dict[str, Any], name: str, tensor: Tensor | None) -> None:
    if name in found:
        assert same(found[name], tensor), f"ranks hold different values of {name!r}"
    found[name] = tensor


# ---- comparing ---------------------------------------------------------------------------------------


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two tensors have the same dtype, shape and bits (NaN equals itself)."""
    if a is None or b is None:
        return a is b
    a, b = (t.to_dense() if t.is_sparse else t.contiguous() for t in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_equal(run: Run, oracle: Run) -> None:
    """Demand the oracle's losses, norms, parameters, gradients and buffers, up to 1e-10."""
    assert run.losses == near(oracle.losses)
    assert [n for n in run.norms if n is not None] == near([n for n in oracle.norms if n is not None])
    for kind in ("params", "grads", "buffers"):
        mine, theirs = getattr(run, kind), getattr(oracle, kind)
        assert mine.keys() == theirs.keys(), kind
        for name, expected in theirs.items():
            assert_close(mine[name], expected, f"{kind}: {name}")


def assert_close(found: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    """Demand the same dtype, shape and, up to 1e-10, values; None only for None."""
    if found is None or expected is None:
        assert found is expected, f"{what}: {found} for {expected}"
        return
    a, b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (found, expected))
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    assert (a.double() - b.double()).abs().max() <= TOLERANCE, f"{what}: {a} for {b}"


def near(value: Any, tolerance: float = TOLERANCE) -> Any:
    """Compare numbers up to ``tolerance`` (absolute)."""
    import pytest

    return pytest.approx(value, rel=0, abs=tolerance)


def assert_same_bits(run: Run, reference: Run) -> None:
    """Demand the very bits of another run."""
    assert run.losses == reference.losses
    assert run.norms == reference.norms
    for kind in ("params", "grads", "buffers"):
        mine, theirs = getattr(run, kind), getattr(reference, kind)
        assert mine.keys() == theirs.keys(), kind
        for name, expected in theirs.items():
            assert same(mine[name], expected), f"{kind}: {name}: {mine[name]} for {expected}"


def check_layouts(job: Job, layouts: Sequence[str], steps: int = 3, **options: Any) -> Run:
    """Compare one device with the oracle, and every layout bit for bit with one device; gives the latter."""
    one = train_in_memory(job, "dp=1", steps, **options)
    assert_equal(one, train_plainly(job, steps, **options))
    for layout in layouts:
        if layout != "dp=1":
            try:
                assert_same_bits(train_in_memory(job, layout, steps, **options), one)
                for per_host in ON_HOSTS.get(layout, ()):
                    assert_same_bits(train_in_memory(job, layout, steps, **options, per_host=per_host), one)
            except BaseException as error:
                error.add_note(f"layout {layout}")
                raise
    return one
