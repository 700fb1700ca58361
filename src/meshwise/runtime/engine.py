"""The interpreter on tensors: one rank's part of a step, action by action.

Methods that may wait are generators: they yield while a result from another rank is not there yet. A process
group's transport never makes them wait that way; in memory several ranks take turns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.order import mix
from ..errors import JobError, NonFiniteError
from ..job import Job
from ..layout import Layout
from ..model.codegen import Site
from ..model.graph import REFS, Input, Value
from ..model.stages import Staged
from ..parallel.packet import Courier, PostedPacket, wait_for
from ..parallel.reduce import Reducer, make_buckets
from ..parallel.transport import Transport
from ..schedule.actions import Action, Op
from ..schedule.library import build_program
from ..tree import leaves, map_leaves
from .cells import Cell, StageState, Values
from .finish import finish_step
from .losses import Weigher, loss_of
from .rows import couple_backward, couple_forward, couple_loss
from .step import Share, StepBatch, StepResult

Steps = Generator[None, None, Any]
LOOKAHEAD = 3
RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)


class Engine:
    """Run the program of one rank. ``model`` holds the whole model; parameters of other stages may be empty."""

    def __init__(
        self, job: Job, layout: Layout, model: nn.Module, transport: Transport, book: Any, weigher: Weigher
    ) -> None:
        self.job, self.layout, self.model, self.transport = job, layout, model, transport
        self.book = book  # captures: microbatch structure -> Staged
        self.weigher = weigher
        self.mesh = layout.mesh
        self.dp_index, self.pp_index = self.mesh.coordinate(transport.rank)
        self.dp_group = self.mesh.dp_group(self.pp_index)
        self.pp_group = self.mesh.pp_group(self.dp_index)
        self.world = tuple(range(self.mesh.num_ranks))
        self.my_stages = tuple(s for s in range(layout.num_stages) if s % layout.pp == self.pp_index)
        self.device = book.device
        self.courier = Courier(transport, self.device)
        self.loss = loss_of(job)
        self.step_index = 0
        self.where = ""
        self.spans: list[tuple[Action, float, float]] | None = None
        self.states: dict[Any, dict[int, StageState]] = {}
        self.reducer: Reducer | None = None
        self.bucket_of: dict[tuple[int, int], list[int]] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: Any = None
        self.hooks: Any = {}
        self.overlap_hooks: list[Any] = []
        self.armed = False
        self.parameters = dict(model.named_parameters())
        self.table = [(m._parameters, k, p) for m in model.modules() for k, p in m._parameters.items()]

    def check_parameters(self) -> None:
        """Refuse a step when a parameter was replaced by another: the optimizer still holds the old one."""
        for held, key, parameter in self.table:
            if held.get(key) is not parameter:
                name = next((n for n, p in self.parameters.items() if p is parameter), key)
                raise JobError(
                    f"parameter {name!r} was replaced after the session started, but the optimizer still holds the "
                    "old one. Copy the new values into it (with torch.no_grad(): parameter.copy_(new)), or start a "
                    "new Session."
                )

    def remove_overlap(self) -> None:
        """Take this engine's hooks off the parameters."""
        for handle in self.overlap_hooks:
            handle.remove()
        self.overlap_hooks = []

    # ---- a step --------------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> Generator[None, None, StepResult]:
        """Run one optimizer step. Every rank calls it with the same global batch."""
        self._begin(batch)
        for at, action in enumerate(self.program):
            self._post_ahead(at)
            yield from self._run(action)
        if not self.local:
            yield from self._idle_rows()
        result: StepResult = yield from finish_step(self)
        self.transport.flush()
        self.step_index += not result.skipped
        return result

    def _begin(self, batch: StepBatch) -> None:
        self.check_parameters()
        for _, _, parameter in self.table:
            if parameter is not None:
                parameter.grad = None
        self.trainable = hash(tuple(p is not None and p.requires_grad for _, _, p in self.table))
        self.batch = batch
        self.share = Share.make(len(batch.sizes), self.job.slots, self.layout.dp)
        low, high = self.share.microbatches[self.dp_index]
        self.local = list(range(low, high))
        probe = batch.microbatch(self.local[0] if self.local else 0)
        self.staged = self._stages(probe)[0]
        self._setup_reducer(self.staged)
        self.cells: dict[tuple[int, int, int], Cell] = {}
        self.incoming: dict[tuple[int, int], Values] = {}
        self.outgoing: dict[tuple[int, int], Values] = {}
        self.posted: dict[Action, PostedPacket | None] = {}
        self.rows: dict[tuple[int, int], Any] = {}
        self.row_sums: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}
        self.loss_values: dict[int, Tensor] = {}
        self.loss_gather: Any = None
        self.sums: dict[tuple[int, Site], Tensor | None] = {}
        self.tensors: dict[Site, Tensor] = {}
        self.begun: set[Any] = set()
        self.packet_keys: dict[int, Any] = {}
        self.stage_views: dict[tuple[int, int], Any] = {}
        self.whole_loss: Any = None
        self._measure()
        self.program = self._program()
        self._begin_reduction()
        if self.my_stages[-1] != self.layout.num_stages - 1:
            self._post_losses()  # nothing to tell; what the last stage tells arrives meanwhile

    def _measure(self) -> None:
        total = self.batch.num_samples
        self.measures = {}
        self.weights = {}
        for m in self.local:
            share = self.batch.sizes[m] / total
            if self.weigher.kind == "sum" or self.weigher.kind == "batch":
                self.measures[m] = share
                self.weights[m] = 1.0
            elif self.weigher.needs_data:
                data = self.batch.microbatch(m)
                self.measures[m] = self.weigher.measure(data)
                self.weights[m] = self.measures[m] / (self.weigher.per_sample * total)
            else:
                self.measures[m] = self.weights[m] = share

    def _program(self) -> tuple[Action, ...]:
        segments = tuple(len(s) for s in self.staged.stages)
        coupled = self.weigher.kind == "batch" and len(self.batch.sizes) > 1
        key = (len(self.local), segments, coupled)
        if key not in self.book.programs:
            self.book.programs[key] = build_program(
                self.layout.schedule,
                num_ranks=self.layout.pp,
                num_microbatches=len(self.local),
                virtual=self.layout.virtual,
                segments=segments,
                couple_loss=coupled,
                tail=False,
            )
        program: tuple[Action, ...] = self.book.programs[key][self.pp_index]
        return program

    # ---- captures ------------------------------------------------------------------------------------

    def _stages(self, data: Any) -> tuple[Staged, dict[int, StageState]]:
        key, staged = self.book.staged(data, coupled=len(self.batch.sizes) > 1)
        return staged, self._stages_for(key, staged)

    def _stages_for(self, key: Any, staged: Staged) -> dict[int, StageState]:
        if key not in self.states:
            self.states[key] = {s: StageState(self.model, staged, s) for s in self.my_stages}
        return self.states[key]

    def _packet_key(self, m: int) -> Any:
        if m not in self.packet_keys:
            self.packet_keys[m] = self.book.staged(
                self.batch.microbatch(m), coupled=len(self.batch.sizes) > 1
            )[0]
        return self.packet_keys[m]

    def _state(self, stage: int, m: int) -> tuple[Any, Staged, StageState]:
        if (stage, m) in self.stage_views:
            return self.stage_views[stage, m]  # type: ignore[no-any-return]
        data = self.batch.microbatch(m)
        staged, states = self._stages(data)
        state = states[stage]
        if id(state) not in self.begun:
            state.begin(self.tensors)
            self.begun.add(id(state))
        self.stage_views[stage, m] = (data, staged, state)
        return data, staged, state

    def _setup_reducer(self, staged: Staged) -> None:
        sites = [(s, site) for s in self.my_stages for site in staged.sites(s)]
        if self.reducer is not None and sites == self.sites:
            return
        self.remove_overlap()
        self.sites = sites
        self.site_index = {key: k for k, key in enumerate(sites)}
        self.bucket_of, buckets = {}, []
        for stage in reversed(self.my_stages):
            for k in reversed(range(len(staged.stages[stage]))):
                mine = [self.site_index[stage, s] for s in reversed(staged.stages[stage][k].sites) if s[0]]
                sizes = [self.parameters[sites[i][1][0]].numel() * 4 for i in mine]
                grouped = [[mine[i] for i in b] for b in make_buckets(sizes)]
                self.bucket_of[stage, k] = list(range(len(buckets), len(buckets) + len(grouped)))
                buckets.extend(grouped)
        exact = self.layout.reduction == "exact"
        self.reducer = Reducer(self.transport, self.dp_group, buckets, exact=exact)

    def _begin_reduction(self) -> None:
        assert self.reducer is not None
        likes = [self.parameters[site[0]] for _, site in self.sites]
        known = self.staged.static and not self.share.has_idle
        self.reducer.begin(len(self.share.slots), self.share.replicas, presence_known=known, likes=likes)
        self.pushed: dict[int, int] = dict.fromkeys(range(len(self.reducer.buckets)), 0)
        self.next_launch = 0
        low, high = self.share.replicas[self.dp_index]
        self.num_slots = high - low

    # ---- actions -------------------------------------------------------------------------------------

    def _run(self, action: Action) -> Steps:
        stage, m = action.stage, self.local[action.microbatch] if action.microbatch >= 0 else -1
        self.where = f"stage {stage}, microbatch {m}" if m >= 0 else f"stage {stage}"
        match action.op:
            case Op.FORWARD:
                self._forward(stage, m, action.segment)
            case Op.BACKWARD:
                self._backward(stage, m, action.segment)
            case Op.BACKWARD_INPUT:
                self._backward_input(stage, m)
            case Op.BACKWARD_WEIGHT:
                cell = self.cells.pop((stage, m, 0))
                self._collect(stage, m, 0, self._state(stage, m)[2].backward_weight(cell), cell)
            case Op.SEND_ACTIVATION:
                self._send(action, self.outgoing.pop((stage, m)), stage + 1)
            case Op.SEND_GRADIENT:
                self._send(action, self.outgoing.pop((-stage, m)), stage - 1)
            case Op.RECEIVE_ACTIVATION:
                self.incoming[stage, m] = yield from self._receive(action)
            case Op.RECEIVE_GRADIENT:
                self.incoming[-stage - 1, m] = yield from self._receive(action)
            case Op.COUPLE_FORWARD:
                yield from self._couple(action, forward=True)
            case Op.COUPLE_BACKWARD:
                yield from self._couple(action, forward=False)

    def _couple(self, action: Action, *, forward: bool) -> Steps:
        stage, segment = action.stage, action.segment
        if segment == len(self.staged.stages[stage]) - 1:
            if forward:
                yield from couple_loss(self)
        elif forward:
            yield from couple_forward(self, stage, segment)
        else:
            yield from couple_backward(self, stage, segment)

    def _idle_rows(self) -> Steps:
        """Take part in the coupled rows of a step in which this replica has no microbatch."""
        rows = [(s, k) for s in self.my_stages for k in range(len(self.staged.stages[s]) - 1)]
        for stage in self.my_stages:
            self.states_for_idle(stage)
        for stage, k in rows:
            yield from couple_forward(self, stage, k)
        if self.weigher.kind == "batch" and self.my_stages[-1] == self.layout.num_stages - 1:
            yield from couple_loss(self)
        self._post_losses()
        for stage, k in reversed(rows):
            yield from couple_backward(self, stage, k)

    def states_for_idle(self, stage: int) -> StageState:
        """Begin a stage's state from the step's first microbatch."""
        return self._state(stage, 0)[2]

    def seeder(self, m: int) -> Any:
        """Give the function that seeds random numbers by (seed, step, microbatch, unit)."""
        seed, step = self.job.seed, self.step_index
        generator = torch.default_generator

        def seed_unit(unit: int) -> None:
            generator.manual_seed(mix(seed, step, m, unit))
            if self.device.type != "cpu":
                torch.manual_seed(mix(seed, step, m, unit))

        return seed_unit

    def autocast(self) -> Any:
        """Give the context that computes in the job's precision."""
        if self.job.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _forward(self, stage: int, m: int, k: int) -> None:
        data, staged, state = self._state(stage, m)
        takes = self._takes(stage, m, k)
        cell = self._forward_cell(data, state, stage, m, k, takes)
        last = k == len(staged.stages[stage]) - 1
        if last and stage == self.layout.num_stages - 1:
            self._evaluate_loss(data, staged, cell, m)
        elif last and (stage + 1) % self.layout.pp != self.pp_index:
            self.outgoing[stage, m] = cell.gives
        if self.layout.recompute and not last:
            cell.gives = hand_over(cell.gives)
        if self.layout.recompute:
            gives = hand_over(cell.gives)
            loss = None if cell.loss is None else cell.loss.detach()
            cell = Cell(takes=takes, gives=gives, loss=loss, rows=cell.rows, whole=cell.whole, later=[])
        self.cells[stage, m, k] = cell
        if (
            stage == self.layout.num_stages - 1
            and last
            and m == self.local[-1]
            and self.weigher.kind != "batch"
        ):
            self._post_losses()

    def _takes(self, stage: int, m: int, k: int) -> Values:
        if k > 0:
            return hand_over(self.cells[stage, m, k - 1].gives)
        if stage == 0:
            return ()
        if (stage, m) in self.incoming:
            return self.incoming.pop((stage, m))
        previous = self.cells[stage - 1, m, len(self.staged.stages[stage - 1]) - 1]
        return hand_over(previous.gives)

    def _forward_cell(self, data: Any, state: StageState, stage: int, m: int, k: int, takes: Values) -> Cell:
        row = self.rows.get((stage, k - 1)) if k > 0 else None
        rows = None if row is None else row.as_buffers(state.buffers_like(state.segments[k]))
        with self.autocast():
            return state.forward(
                k,
                self.book.inputs(data),
                takes,
                batch=self.batch.sizes[m],
                seed=self.seeder(m),
                rows=rows,
                key=(m, k),
            )

    def _evaluate_loss(self, data: Any, staged: Staged, cell: Cell, m: int) -> None:
        output = rebuild_output(staged, cell.gives, cell.whole, self.book.inputs(data))
        if self.weigher.kind == "batch" and len(self.batch.sizes) > 1:
            cell.whole = output
            return
        self.seeder(m)(1 << 20)
        weight = self.weights[m]
        with self.autocast():
            loss = self.loss(output, data)
        self.loss_values[m] = loss.detach()
        if weight == 0.0:
            loss = sum(t.sum() * 0.0 for t in leaves(output) if isinstance(t, Tensor) and t.requires_grad)  # type: ignore[assignment]
        cell.loss = loss if weight == 1.0 else loss * weight
        cell.whole = None

    def _gives_grads(self, stage: int, m: int, k: int, cell: Cell) -> Values:
        if k < len(self.staged.stages[stage]) - 1:
            return self.incoming.pop((stage, m, k))  # type: ignore[call-overload,no-any-return]
        if stage == self.layout.num_stages - 1:
            return self.whole_loss.grads(m, cell) if self.whole_loss is not None else ()
        return self.incoming.pop((-stage - 1, m))

    def _again(self, stage: int, m: int, k: int, cell: Cell) -> Cell:
        """Run a cell's forward again where activations were not kept."""
        data, staged, state = self._state(stage, m)
        again = self._forward_cell(data, state, stage, m, k, cell.takes)
        if stage == self.layout.num_stages - 1 and k == len(staged.stages[stage]) - 1:
            self._evaluate_loss(data, staged, again, m)
        return again

    def _backward(self, stage: int, m: int, k: int) -> None:
        cell = self.cells.pop((stage, m, k))
        grads = self._gives_grads(stage, m, k, cell)
        if self.layout.recompute:
            cell = self._again(stage, m, k, cell)
        self.armed = self._arm(stage, m)
        taken, leaf_grads = self._state(stage, m)[2].backward(cell, grads)
        self.armed = False
        self._pass_down(stage, m, k, taken)
        self._collect(stage, m, k, leaf_grads, cell)

    def _backward_input(self, stage: int, m: int) -> None:
        cell = self.cells[stage, m, 0]
        grads = self._gives_grads(stage, m, 0, cell)
        if self.layout.recompute:
            cell = self.cells[stage, m, 0] = self._again(stage, m, 0, cell)
        taken = self._state(stage, m)[2].backward_input(cell, grads)
        self._pass_down(stage, m, 0, taken)

    def _pass_down(self, stage: int, m: int, k: int, taken: Values) -> None:
        if k > 0:
            self.incoming[stage, m, k - 1] = taken  # type: ignore[index]
        elif stage > 0 and (stage - 1) % self.layout.pp == self.pp_index:
            self.incoming[-stage, m] = taken
        elif stage > 0:
            self.outgoing[-stage, m] = taken

    # ---- gradients -----------------------------------------------------------------------------------

    def _arm(self, stage: int, m: int) -> bool:
        """Tell whether gradients of this backward may leave while it runs (dp only, the last microbatch)."""
        alone = self.layout.num_stages == 1 and len(self.staged.stages[0]) == 1 and len(self.dp_group) > 1
        if not alone or m != self.local[-1] or self.share.slots[self.share.slot_end(m) or 0][0] > m:
            return False
        if not self.overlap_hooks:
            self._register_overlap()
        assert self.reducer is not None
        self.waiting = [len(b.sites) for b in self.reducer.buckets]
        return True

    def _register_overlap(self) -> None:
        assert self.reducer is not None
        for b, bucket in enumerate(self.reducer.buckets):
            for site in bucket.sites:
                stage, name = self.sites[site]
                leaf = self.tensors[name]
                if isinstance(leaf, nn.Parameter):
                    self.overlap_hooks.append(leaf.register_post_accumulate_grad_hook(self._overlap_hook(b)))

    def _overlap_hook(self, bucket: int) -> Any:
        def hook(leaf: Tensor) -> None:
            if not self.armed:
                return
            self.waiting[bucket] -= 1
            if self.waiting[bucket] == 0:
                self._push_bucket(bucket, self.local[-1])

        return hook

    def _collect(self, stage: int, m: int, k: int, leaf_grads: list[Tensor | None], cell: Cell) -> None:
        segment = self._state(stage, m)[2].segments[k]
        if leaf_grads:
            self._add_grads(stage, m, segment.sites, leaf_grads, segment.row_sites, k)
        slot = self.share.slot_end(m)
        if slot is None:
            return
        for bucket in self.bucket_of[stage, k]:
            self._push_bucket(bucket, m)

    def _add_grads(
        self,
        stage: int,
        m: int,
        sites: Sequence[Site],
        grads: Sequence[Tensor | None],
        row_sites: Any,
        k: int,
    ) -> None:
        seen: set[int] = set()
        for site, grad in zip(sites, grads, strict=True):
            if grad is None:
                continue
            leaf = self.tensors[site]
            grad = own_grad(grad, leaf, seen)
            if row_sites and site in row_sites:
                pair = self.row_sums.setdefault((stage, k - 1), {}).setdefault(m, [None, None])  # type: ignore[arg-type]
                pair[row_sites.index(site)] = grad.double()  # type: ignore[index]
            if site[0]:
                leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)

    def _push_bucket(self, bucket: int, m: int) -> None:
        """Hand a bucket's gradients of the slot that ends with microbatch ``m`` to the reduction, once."""
        assert self.reducer is not None
        slot = self.share.slot_end(m)
        assert slot is not None
        done = slot - self.share.replicas[self.dp_index][0] + 1
        if self.pushed[bucket] >= done:
            return
        self.pushed[bucket] = done
        grads = []
        for site in self.reducer.buckets[bucket].sites:
            key = self.sites[site][1]
            leaf = self.tensors[key]
            frozen = key[1] < 0 and not self.parameters[key[0]].requires_grad
            grads.append(None if frozen else leaf.grad)
            leaf.grad = None
        self.reducer.push(bucket, slot, grads)
        while self.next_launch < len(self.pushed) and self.pushed[self.next_launch] == self.num_slots:
            self.reducer.launch(self.next_launch)
            self.next_launch += 1

    # ---- messages ------------------------------------------------------------------------------------

    def _route(self, action: Action) -> tuple[int, int, Any]:
        """Give the peer, the tag and the packet's kind of a send or receive."""
        m = self.local[action.microbatch]
        key = self._packet_key(m)
        stage = action.stage
        up = action.op in (Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION)
        boundary = stage if action.op in (Op.RECEIVE_ACTIVATION, Op.SEND_GRADIENT) else stage + 1
        sending = action.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
        other = boundary if (up == sending) else boundary - 1
        peer = self.mesh.stage_rank(other, dp=self.dp_index)
        tag = (boundary * 8192 + action.microbatch) * 2 + (0 if up else 1)
        return peer, tag, (up, boundary, self.batch.sizes[m], key, self.trainable)

    def _send(self, action: Action, values: Values, to_stage: int) -> None:
        peer, tag, key = self._route(action)
        self.courier.send(values, peer, tag, key, static=self.staged.static)

    def _receive(self, action: Action) -> Generator[None, None, Values]:
        posted = self.posted.pop(action, None)
        if posted is not None:
            return (yield from posted.finish())
        peer, tag, key = self._route(action)
        return (yield from self.courier.receive(peer, tag, key, static=self.staged.static))

    def _post_ahead(self, at: int) -> None:
        """Post the next receives, so that data can arrive while cells run."""
        for action in self.program[at : at + LOOKAHEAD]:
            if action.op in RECEIVES and self.posted.get(action) is None:
                peer, tag, key = self._route(action)
                self.posted[action] = self.courier.post(peer, tag, key, static=self.staged.static)

    # ---- losses --------------------------------------------------------------------------------------

    def _post_losses(self) -> None:
        """Send this rank's microbatch losses on their way to all ranks, behind the backward; once a step."""
        if self.loss_gather is not None:
            return
        rows = torch.zeros((max(1, max(self.share.counts)), 2), dtype=torch.float64)
        for j, m in enumerate(self.local):
            if m in self.loss_values:
                rows[j, 0] = self.loss_values[m]
            rows[j, 1] = self.measures[m]
        if len(self.world) == 1:
            self.loss_gather = [rows]
        else:
            self.loss_gather = self.transport.all_gather(rows.to(self.device), self.world)

    def gather_losses(self) -> Steps:
        """Give (losses, measures) of all microbatches of the step, in order."""
        if self.loss_gather is None:
            self._post_losses()
        parts = self.loss_gather
        if not isinstance(parts, list):
            parts = yield from wait_for(parts)
        losses: list[float] = []
        measures: list[float] = []
        for dp, count in enumerate(self.share.counts):
            part = parts[self.mesh.rank(dp=dp, pp=(self.layout.num_stages - 1) % self.layout.pp)].cpu()
            losses += part[:count, 0].tolist()
            measures += part[:count, 1].tolist()
        return losses, measures

    def check_losses(self, losses: Sequence[float]) -> bool:
        """Tell whether all losses are finite; raise when the job says to stop."""
        bad = [m for m, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return True
        if self.job.on_nonfinite == "skip":
            return False
        m = min(bad[0], len(self.batch.sizes) - 1)
        dp = next(i for i, (a, b) in enumerate(self.share.microbatches) if a <= m < b)
        rank = self.mesh.rank(dp=dp, pp=(self.layout.num_stages - 1) % self.layout.pp)
        ids = self.batch.ids_of(m)
        raise NonFiniteError(
            f"step {self.step_index}: the loss of microbatch {m} on rank {rank} is {losses[bad[0]]}"
            f"{f' (samples {list(ids)})' if ids else ''}; nothing was updated. "
            'Look at those samples, lower the learning rate, or use Job(on_nonfinite="skip").'
        )


def hand_over(values: Values) -> Values:
    """Cut autograd between two cells of one rank: the same memory, new leaves."""
    return tuple(
        v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v for v in values
    )


def own_grad(grad: Tensor, leaf: Tensor, seen: set[int]) -> Tensor:
    """Make a raw gradient one that may be changed in place: in the leaf's layout, shared with no other."""
    if grad.is_sparse:
        return grad
    if grad.stride() != leaf.stride() or not grad.numel() or grad.data_ptr() in seen:
        copy = torch.empty_like(leaf, memory_format=torch.preserve_format)
        return copy.copy_(grad)
    seen.add(grad.data_ptr())
    return grad


def rebuild_output(staged: Staged, gives: Values, whole: Any, inputs: Sequence[Any]) -> Any:
    """Rebuild what the model returned; outputs that the loss never touches are None."""
    if staged.graph.blocked:
        return whole
    values = dict(zip(staged.stages[-1][-1].gives, gives, strict=True))

    def find(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return values.get(leaf.index)
        if isinstance(leaf, Input):
            return inputs[leaf.index]
        return None if isinstance(leaf, REFS) else leaf

    return map_leaves(find, staged.graph.output)
