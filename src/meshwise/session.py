"""A session: one rank's hold on a job, for people who keep their own training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint.manifest import PINNED, Manifest, differences
from .checkpoint.store import Checkpoint, latest, load_checkpoint, save_checkpoint
from .errors import CheckpointError, LayoutError, MeshwiseError
from .grid import microbatch_sizes, slot_ranges
from .job import Job
from .launch.environment import detect, device_for, num_devices
from .launch.memory import freed_memory_kept
from .launch.rank import join_environment
from .layout import Layout, is_auto
from .parallel.connect import connect
from .parallel.transport import Mailroom, MemoryTransport, Transport, wait_for
from .plans import Plan
from .runtime.evaluate import evaluate
from .runtime.look import look
from .runtime.offers import Facts, offers, processor_flags
from .runtime.state import WholeState, gather_state, restore_state
from .runtime.step import StepBatch, StepResult
from .runtime.worker import Worker, drive

log = logging.getLogger("meshwise")


def choose_layout(job: Job, layout: str | Layout, devices: int | None) -> Layout:
    """Settle the layout: as written, or "auto": as many replicas as there are devices and slots to share.

    Raises LayoutError when layout and devices contradict each other.
    """
    slots = len(slot_ranges(len(microbatch_sizes(job.batch_size, job.microbatch)), job.slots))
    if not is_auto(layout):
        chosen = Layout.parse(layout, devices=devices)
        asked = f"dp={chosen.dp}"
    else:
        available = devices if devices is not None else min(num_devices(), slots)
        chosen, asked = Layout(dp=available), f"devices={available} (one replica each)"
    chosen.check_runnable()
    if chosen.dp > slots:
        raise LayoutError(
            f"{asked}, but a step has only {slots} slots to share between replicas; use dp={slots} at most (and pp for "
            f"more devices), a smaller microbatch_size (now {job.microbatch}), or more slots (now {job.slots})."
        )
    return chosen


def make_transport(layout: Layout, rank: int, device: torch.device) -> Transport:
    """Make the transport of one rank: none is needed alone, else the process group's. Every rank calls it."""
    if layout.num_devices == 1:
        return MemoryTransport(0, Mailroom())
    mesh = layout.mesh
    groups = [mesh.dp_group(i) for i in range(mesh.pp)] + [mesh.pp_group(i) for i in range(mesh.dp)]
    return connect(rank, groups, device)


class Session:
    """Train a job step by step under a layout; on every rank the same calls.

    ::

        with mw.Session(job, layout="pp=2") as session:
            for batch in session.batches():
                step = session.step(batch)       # step.loss, step.grad_norm, step.num_samples
            session.evaluate()
            session.save("checkpoint")

    ``layout="auto"`` takes the layout that a plan chooses for all ranks. ``cuts``: the first units of the stages after
    the first, as a plan chose them. Runs on one device by itself; on
    more inside ``torchrun`` or ``meshwise.launch.local.run_ranks``. Raises LayoutError when the layout does not fit the
    ranks there are.
    """

    def __init__(
        self,
        job: Job,
        layout: str | Layout = "auto",
        *,
        devices: int | None = None,
        threads: int | None = None,
        device: torch.device | None = None,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.job = job
        self._own_group = False
        self._threads = torch.get_num_threads()
        rank, world, found = self._join(threads)
        device = found if device is None else device
        self.plan: Plan | None = None
        settled_notes: list[str] = []
        if world > 1 and devices is None and (is_auto(layout) or job.microbatch_size == "auto"):
            from .settling import settle_among_ranks

            settled = settle_among_ranks(job, layout, device, threads=threads or 1)
            self.job = job = settled.job
            layout, cuts = settled.layout, settled.cuts
            self.plan, settled_notes = settled.made, settled.notes
        self.layout = choose_layout(job, layout, devices if devices is not None else world)
        if self.layout.num_devices != world:
            raise LayoutError(
                f"layout {self.layout} needs {self.layout.num_devices} ranks, but {world} "
                f"{'is' if world == 1 else 'are'} running. Start that many (torchrun --nproc-per-node="
                f"{self.layout.num_devices} ..., or meshwise.train(job, devices={self.layout.num_devices}))."
            )
        self.rank = rank
        self.device = device
        self._open = contextlib.ExitStack()
        if world == 1 and device.type == "cpu":  # ranks do so from their start
            self._open.enter_context(freed_memory_kept())
        self.worker = Worker(job, self.layout, make_transport(self.layout, rank, device), device, cuts)
        self.warnings = look(job, self.worker.model, self.worker.staged) if rank == 0 else []
        self.notes = [*settled_notes, *self.worker.notes]
        self.offers = offers(self._facts(world)) if rank == 0 else []

    def _facts(self, world: int) -> Facts:
        """Gather what decides which faster settings there are for the user to choose."""
        convolutions = [m for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        return Facts(
            device_type=self.device.type,
            num_ranks=min(world, detect().local_world_size) if detect().world_size > 1 else world,
            threads=torch.get_num_threads(),
            num_cores=num_devices("cpu"),
            precision=self.job.precision if all(p.dtype == torch.float32 for p in self.model.parameters()) else "mixed",
            has_convolutions=bool(convolutions),
            is_channels_last=any(
                m.weight.is_contiguous(memory_format=torch.channels_last) and not m.weight.is_contiguous()
                for m in convolutions
            ),
            flags=processor_flags(),
        )

    def _join(self, threads: int | None) -> tuple[int, int, torch.device]:
        environment = detect()
        if not dist.is_initialized() and environment.world_size > 1:
            context = join_environment(environment, threads=threads or 1, emit=lambda event: None)
            self._own_group = True
            return context.rank, context.world_size, context.device
        if threads is not None:
            torch.set_num_threads(threads)
        if dist.is_initialized():
            return dist.get_rank(), dist.get_world_size(), device_for(environment.local_rank)
        return 0, 1, device_for(0)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group if this session joined it, and put the number of threads back."""
        self.worker.engine.gradients.remove_overlap()
        torch.set_num_threads(self._threads)
        self._open.close()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False

    @property
    def model(self) -> nn.Module:
        """Give this rank's model; under pp only the parameters of its own stages hold values."""
        return self.worker.model

    @property
    def step_index(self) -> int:
        """Count the steps so far, skipped ones included: the position in the data."""
        return self.worker.engine.step_index

    @property
    def position(self) -> tuple[int, int]:
        """Give the epoch and the step within it that come next."""
        per_epoch = self.worker.steps_per_epoch()
        return divmod(self.step_index, per_epoch) if per_epoch else (0, self.step_index)

    def batches(self, epochs: int | None = None) -> Iterator[StepBatch]:
        """Give the global batches of the epochs that are left, from where the session stands."""
        epoch, first = self.position
        last = self.job.epochs if epochs is None else epoch + epochs
        while epoch < last:
            yield from self.worker.batches(epoch, first)
            epoch, first = epoch + 1, 0

    def step(self, batch: Any) -> StepResult:
        """Run one optimizer step on a global batch: one of :meth:`batches`, or tensors the same on every rank.

        Raises NonFiniteError (on every rank) for a loss that is not finite; any error of the user's code is
        raised with a note that says rank, stage, microbatch and shapes.
        """
        if not isinstance(batch, StepBatch):
            batch = self.worker.split_batch(batch)
        try:
            result: StepResult = drive(self.worker.step(batch))
        except MeshwiseError:  # it says itself where it happened
            raise
        except Exception as error:
            self._add_place(error, batch)
            raise
        return result

    def _add_place(self, error: Exception, batch: StepBatch) -> None:
        from .tree import leaves

        engine = self.worker.engine
        shapes = [
            f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for data in list(batch.loaded.values())[-1:]
            for t in leaves(data)
            if isinstance(t, torch.Tensor)
        ]
        place = f"rank {self.rank}, step {engine.step_index}, {engine.where or 'loading data'}"
        note = f"in {place}, microbatch of {', '.join(shapes)}"
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            log.error(note)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluate on ``data`` (default: the job's eval_data), each sample once: loss, metrics, num_samples."""
        data = self.job.eval_data if data is None else data
        if data is None:
            return {}
        result: dict[str, float] = drive(evaluate(self.worker, data))
        return result

    def state(self) -> WholeState | None:
        """Gather the whole state on rank 0 (None on other ranks). Every rank calls it."""
        state: WholeState | None = drive(gather_state(self.worker))
        return state

    def manifest(self) -> Manifest:
        """Give the facts that pin the job's arithmetic."""
        size = self.job.microbatch
        return Manifest.of_this_process(
            job=self.job.name,
            seed=self.job.seed,
            batch_size=self.job.batch_size,
            microbatch_sizes=microbatch_sizes(self.job.batch_size, size),
            slots=self.job.slots,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
        )

    def save(self, folder: str | Path, **extra: Any) -> None:
        """Save a checkpoint that loads under any layout. Every rank calls it; rank 0 writes."""
        state = self.state()
        if state is not None:
            save_checkpoint(
                Path(folder),
                tensors=state.tensors,
                optimizer=state.optimizer,
                extra={**state.extra, "samples": self.worker.samples_before(self.step_index), **extra},
                manifest=self.manifest(),
            )
        self._meet()

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Load a checkpoint (or a run's newest one) written under any layout. Every rank calls it.

        Raises CheckpointError when it is missing, torn, or of a job whose arithmetic differs.
        """
        path = Path(folder)
        if (path / "checkpoints").is_dir():
            found = latest(path / "checkpoints")
            if found is None:
                raise CheckpointError(f"{path} holds no checkpoint; run it again without resume.")
            path = found
        checkpoint = load_checkpoint(path)
        self._check_resume(checkpoint)
        state = WholeState(
            tensors=dict(checkpoint.tensors),
            optimizer={n: dict(s) for n, s in checkpoint.optimizer.items()},
            extra=dict(checkpoint.extra),
        )
        restore_state(self.worker, state)
        return dict(checkpoint.extra)

    def _check_resume(self, checkpoint: Checkpoint) -> None:
        """Refuse to go on as another job than the run began as; say what else has changed."""
        pinned = differences(checkpoint.manifest, self.manifest(), PINNED)
        if pinned:
            raise CheckpointError(
                f"the run cannot go on as another job: {' '.join(pinned)} Use the job that it began with; to start "
                "anew from its weights, export them and load them in the model."
            )
        if self.rank == 0:
            for line in differences(checkpoint.manifest, self.manifest()):
                log.warning("resume: %s", line)
        step, samples = checkpoint.extra.get("step"), checkpoint.extra.get("samples")
        if samples is not None and self.worker.step_after(samples) != step:
            raise CheckpointError(
                f"the run had trained on {samples} samples in {step} steps, which does not fit the "
                f"{self.worker.loader.num_samples} samples of train_data; go on with the data that it began with."
            )

    def agree(self, value: Any) -> Any:
        """Give rank 0's value on every rank. Every rank calls it."""
        engine = self.worker.engine
        return drive(wait_for(engine.transport.all_gather_object(value, engine.world)))[0]

    def _meet(self) -> None:
        if self.layout.num_devices > 1:
            dist.barrier()
