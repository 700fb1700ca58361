"""One rank's part of a job: its model, its data, its engine; built the same way on every rank."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.loader import MicrobatchLoader
from ..data.order import epoch_order, locate, num_steps, step_ids
from ..errors import CaptureError, DataError
from ..grid import microbatch_sizes
from ..job import Job
from ..layout import Layout
from ..parallel.transport import Transport
from ..tree import map_leaves
from .book import Book
from .build import build_model
from .elementwise import FusedUpdate
from .engine import Engine
from .finish import holders
from .losses import count_samples
from .probe import PROBE_SAMPLES, make_weigher
from .step import Share, StepBatch, StepResult
from .update import build_optimizer, take_hooks


def move(data: Any, device: torch.device, precision: str) -> Any:
    """Bring a microbatch to the device, and floating tensors to float64 where the job computes in it."""
    if device.type == "cpu" and precision != "float64":
        return data

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wide = precision == "float64" and leaf.is_floating_point()
        return leaf.to(device, torch.float64 if wide else leaf.dtype, non_blocking=True)

    return map_leaves(change, data)


class Worker:
    """Hold what one rank needs to train. Every rank makes one, with the same job, layout and (planned) cuts."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        transport: Transport,
        device: torch.device,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.job, self.layout, self.transport, self.device = job, layout, transport, device
        self.loader = MicrobatchLoader(job.train_data, seed=job.seed, num_workers=job.num_workers or None)
        self.drop_last = job.drop_last or self.loader.drop_last
        self.shuffle = job.shuffle if self.loader.shuffle is None else self.loader.shuffle
        self.model = build_model(job, device, lambda: self._probe(self._microbatch_size()))
        self.model.train()
        self.book = Book(job, layout, self.model, device, cuts)
        probe = self._probe(self._microbatch_size())
        coupled = len(microbatch_sizes(job.batch_size, job.microbatch)) > 1
        _, self.staged = self.book.staged(probe, coupled=coupled)
        self._check_blocked()
        self.weigher, note = make_weigher(job, self.model, self.book.forward, self._loss_probe(probe))
        self.notes = [note, *self._opaque_notes()]
        self.engine = Engine(job, layout, self.model, transport, self.book, self.weigher)
        self._finish_engine()

    def _finish_engine(self) -> None:
        self.engine.hooks = take_hooks(self.model.parameters())
        self.engine.optimizer = build_optimizer(self.job, self.model)
        self.engine.fused = FusedUpdate(self.engine.optimizer)
        if self.job.scheduler is not None:
            self.engine.scheduler = self.job.scheduler(self.engine.optimizer)
        self._release_others()

    def _move(self, data: Any) -> Any:
        return move(data, self.device, self.job.precision)

    # ---- checks ----------------------------------------------------------------------------------

    def _check_blocked(self) -> None:
        graph = self.staged.graph
        norms = [n for n, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        several = len(microbatch_sizes(self.job.batch_size, self.job.microbatch)) > 1
        if graph.blocked and norms and several and self.job.batch_norm == "batch":
            raise CaptureError(
                f'BatchNorm "{norms[0]}" needs statistics over the whole batch, but the model cannot be looked into: '
                f'{graph.blocked}. Use Job(batch_norm="microbatch"), or microbatch_size={self.job.batch_size} on one '
                "device."
            )

    def _opaque_notes(self) -> list[str]:
        graph = self.staged.graph
        if graph.blocked:
            return [f"the model runs as a whole (dp only): {graph.blocked}"]
        return [f'module "{path}" runs as a whole: {why}' for path, why in sorted(graph.opaque.items())]

    def _microbatch_size(self) -> int:
        size = self.job.microbatch if isinstance(self.job.microbatch, int) else max(self.job.microbatch)
        return min(size, 8)

    def _loss_probe(self, probe: Any) -> Any:
        """Give samples enough to tell how losses add up; those that only fit one by one stay as they are."""
        if count_samples(probe) >= PROBE_SAMPLES:
            return probe
        try:
            return self._probe(PROBE_SAMPLES)
        except (RuntimeError, ValueError, TypeError):
            return probe

    def _probe(self, size: int) -> Any:
        if self.loader.num_samples is None:
            samples = next(self.loader.iterate(0, size), None)
            if not samples:
                raise DataError("train_data gave no sample.")
            return self._move(self.loader.collate(0, range(len(samples)), samples))
        if self.loader.num_samples == 0:
            raise DataError("train_data holds no samples.")
        size = min(size, self.loader.num_samples)
        return self._move(self.loader.fetch(0, self.order(0)[:size]))

    # ---- parameters --------------------------------------------------------------------------------

    @property
    def held(self) -> set[str]:
        """Name the parameters that have their values on this rank."""
        held = holders(self.engine)
        return {
            n
            for n, _ in self.model.named_parameters()
            if self.engine.pp_index in held.get(n, range(self.layout.pp))  # all keep what no stage uses
        }

    def _release_others(self) -> None:
        """Give back the memory of parameters that other stages hold; their shape stays."""
        held = self.held
        for name, parameter in self.model.named_parameters():
            if name not in held:
                parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
                    parameter.shape
                )

    def owner(self, name: str) -> int:
        """Give the pipeline rank that speaks for a parameter or buffer."""
        found = self.book.placed.ranks(name)
        return found[0] if found else self.book.placed.buffers.get(name, 0) % self.layout.pp

    # ---- data --------------------------------------------------------------------------------------

    def order(self, epoch: int) -> Sequence[int]:
        """Give the sample ids of an epoch in order."""
        assert self.loader.num_samples is not None
        return epoch_order(self.loader.num_samples, self.job.seed, epoch, self.shuffle)

    def steps_per_epoch(self) -> int | None:
        """Count the optimizer steps of an epoch (None for a stream)."""
        if self.loader.num_samples is None:
            return None
        return num_steps(self.loader.num_samples, self.job.batch_size, self.drop_last)

    def samples_before(self, step: int) -> int | None:
        """Count the samples of the steps before ``step`` since the run began (None for a stream)."""
        per_epoch, count = self.steps_per_epoch(), self.loader.num_samples
        if not per_epoch or count is None:
            return None
        epoch, inside = divmod(step, per_epoch)
        whole = min(count, per_epoch * self.job.batch_size)
        return epoch * whole + inside * self.job.batch_size

    def step_after(self, samples: int) -> int | None:
        """Give the step that comes after so many samples, or None where no step begins there."""
        count = self.loader.num_samples or 0
        try:
            place = locate(
                samples, num_samples=count, batch_size=self.job.batch_size, drop_last=self.drop_last
            )
        except DataError:
            return None
        return place.epoch * (self.steps_per_epoch() or 0) + place.step

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[StepBatch]:
        """Give the global batches of an epoch; microbatches of other replicas are never loaded."""
        if self.loader.num_samples is None:
            yield from self._stream_batches(epoch, first_step)
            return
        order = self.order(epoch)
        steps = self.steps_per_epoch() or 0
        batches = [
            self._batch(epoch, step_ids(order, s, self.job.batch_size)) for s in range(first_step, steps)
        ]
        if self.loader.num_workers:
            self._prefetch(epoch, batches)
        yield from batches

    def _batch(self, epoch: int, ids: Sequence[int]) -> StepBatch:
        ids = tuple(map(int, ids))
        batch = StepBatch(
            sizes=microbatch_sizes(len(ids), self.job.microbatch), load=lambda m: None, ids=ids, epoch=epoch
        )
        batch.load = lambda m: self._move(self.loader.fetch(epoch, batch.ids_of(m)))
        return batch

    def _prefetch(self, epoch: int, batches: list[StepBatch]) -> None:
        plan = []
        for batch in batches:
            low, high = Share.make(len(batch.sizes), self.job.slots, self.layout.dp).microbatches[
                self.engine.dp_index
            ]
            plan += [(batch, m) for m in range(low, high)]
        stream = self.loader.stream(epoch, ((k, b.ids_of(m)) for k, (b, m) in enumerate(plan)))
        number = {(id(b), m): k for k, (b, m) in enumerate(plan)}
        ahead: dict[int, Any] = {}
        for batch in batches:
            batch.load = self._loader_from(stream, number, ahead, batch, batch.load)

    def _loader_from(
        self, stream: Any, number: Any, ahead: dict[int, Any], batch: StepBatch, direct: Any
    ) -> Any:
        def load(m: int) -> Any:
            wanted = number.pop((id(batch), m), None)
            if wanted is None:  # another replica's, or asked for once more
                return direct(m)
            while wanted not in ahead:
                k, data = next(stream)
                ahead[k] = data
            return self._move(ahead.pop(wanted))

        return load

    def _stream_batches(self, epoch: int, first_step: int) -> Iterator[StepBatch]:
        at = 0
        for step, samples in enumerate(self.loader.iterate(epoch, self.job.batch_size)):
            ids = tuple(range(at, at + len(samples)))
            at += len(samples)
            if step < first_step or (self.drop_last and len(samples) < self.job.batch_size):
                continue
            yield self._samples_batch(epoch, ids, samples)

    def _samples_batch(self, epoch: int, ids: tuple[int, ...], samples: list[Any]) -> StepBatch:
        sizes = microbatch_sizes(len(ids), self.job.microbatch)

        def load(m: int) -> Any:
            start = sum(sizes[:m])
            part = samples[start : start + sizes[m]]
            return self._move(self.loader.collate(epoch, ids[start : start + sizes[m]], part))

        return StepBatch(sizes=sizes, load=load, ids=ids, epoch=epoch)

    def split_batch(self, data: Any, epoch: int = 0) -> StepBatch:
        """Make a step of a global batch that the user brings (the same on every rank)."""
        count = count_samples(data)
        sizes = microbatch_sizes(count, self.job.microbatch)

        def load(m: int) -> Any:
            start = sum(sizes[:m])

            def cut(leaf: Any) -> Any:
                if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == count:
                    return leaf[start : start + sizes[m]].clone()
                return leaf

            return self._move(map_leaves(cut, data))

        return StepBatch(sizes=sizes, load=load, epoch=epoch)

    def step(self, batch: StepBatch) -> Generator[None, None, StepResult]:
        """Run one optimizer step (a generator; see Engine)."""
        return (yield from self.engine.step(batch))


def drive(generator: Generator[None, None, Any]) -> Any:
    """Run a generator of a blocking transport to its end and give its result."""
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def drive_together(generators: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """Run the generators of several ranks in one process in turns, and give their results.

    Raises DeadlockError when none can go on.
    """
    from ..errors import DeadlockError

    results: dict[int, Any] = {}
    idle = 0
    while len(results) < len(generators):
        for i, generator in enumerate(generators):
            if i in results:
                continue
            try:
                next(generator)
            except StopIteration as stop:
                results[i] = stop.value
                idle = 0
        idle += 1
        if idle > 10_000:
            raise DeadlockError(f"ranks {sorted(set(range(len(generators))) - set(results))} wait for ever")
    return [results[i] for i in range(len(generators))]
