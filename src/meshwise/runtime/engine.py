"""The interpreter on tensors: one rank's part of a step, action by action.

Methods that may wait are generators: they yield while a result from another rank is not there yet. A process
group's transport never makes them wait that way; in memory several ranks take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..data.order import mix
from ..errors import JobError
from ..job import Job
from ..layout import Layout
from ..model.codegen import Site
from ..model.graph import REFS, Input, Value
from ..model.inputs import Inputs
from ..model.stages import Staged
from ..parallel.transport import Transport
from ..schedule.actions import Action, Op
from ..schedule.library import build_program
from ..tree import leaves, map_leaves
from .cells import Cell, StageState, Values
from .commons import Commons
from .finish import finish_step
from .gradients import Gradients
from .losses import Weigher, loss_of
from .losstable import LossTable
from .messages import Messages
from .rows import couple_backward, couple_forward, couple_loss
from .step import Share, StepBatch, StepResult, mixed_step

Steps = Generator[None, None, Any]
FORWARD_OPS = (Op.FORWARD, Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION, Op.COUPLE_FORWARD)
# What other ranks may wait for; it goes before gradients are added up.
BEFORE_SETTLING = (Op.FORWARD, Op.SEND_ACTIVATION, Op.SEND_GRADIENT)


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
        self.loss = loss_of(job)
        self.loss_draws = getattr(type(job.loss), "__module__", "") != "torch.nn.modules.loss"
        self.step_index = 0
        self.compares_buffers = True  # in the first step: do replicas agree on what code leaves in buffers?
        self.unlike_buffers: set[str] = set()  # where they do not (code that looks at its rank, say)
        self.where = ""
        self.spans: list[tuple[Action, float, float]] | None = None  # what was done when, where somebody looks
        self.states: dict[Any, dict[int, StageState]] = {}
        self.shares: dict[int, Share] = {}  # by number of microbatches
        self.optimizer: torch.optim.Optimizer | None = None
        self.fused: Any = None  # how this rank steps the optimizer on parameters of its own
        self.scheduler: Any = None
        self.hooks: Any = {}
        self.parameters = dict(model.named_parameters())
        self.table = [(m._parameters, k, p) for m in model.modules() for k, p in m._parameters.items()]
        self.messages = Messages(self)
        self.courier = self.messages.courier
        self.gradients = Gradients(self)
        self.commons = Commons(self)
        self.losses = LossTable(self)

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

    # ---- a step --------------------------------------------------------------------------------------

    def step(self, batch: StepBatch) -> Generator[None, None, StepResult]:
        """Run one optimizer step. Every rank calls it with the same global batch."""
        self._begin(batch)
        yield from self.gradients.begin(self.staged)
        if self.in_pairs and self.spans is None:
            for m in self.local:
                yield from self._pair(m)
        else:
            yield from self._run_all()
        if not self.local:
            yield from self._idle_rows()
        result: StepResult = yield from finish_step(self)
        self.transport.flush()
        self.step_index += 1
        self._release()
        return result

    def _run_all(self) -> Steps:
        for at, action in enumerate(self.program):
            if self.layout.pp > 1:
                self.messages.post_ahead(at)
            begun = time.perf_counter() if self.spans is not None else 0.0
            if action.op not in BEFORE_SETTLING:
                self.gradients.settle()
            yield from self._run(action)
            if self.spans is not None:
                self.spans.append((action, begun, time.perf_counter()))
        self.gradients.settle()

    def noted(self, op: Op, begun: float) -> float:
        """Note what was done since ``begun`` if somebody looks; give the time now."""
        if self.spans is None:
            return 0.0
        now = time.perf_counter()
        self.spans.append((Action(op), begun, now))
        return now

    def _pair(self, m: int) -> Steps:
        """Run a forward and the backward that follows it at once: the whole model on one microbatch."""
        self.where = f"stage 0, microbatch {m}"
        inputs, staged, state = self.state(0, m)
        cell = self._forward_cell(inputs, state, 0, m, 0, ())
        self._evaluate_loss(inputs, staged, cell, m)
        if self.gradients.entered is not None:
            yield from self.gradients.wait_for_replicas()
        self.gradients.armed = self.gradients.arm(m)
        self.gradients.aim(0, m, 0)
        state.backward(cell, ())
        self.gradients.armed = False
        self.gradients.collect(0, m, 0, [])

    def _begin(self, batch: StepBatch) -> None:
        self.where = ""
        self.check_parameters()
        self.book.refresh()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.trainable = hash(tuple([p.requires_grad for p in self.parameters.values()]))
        self.batch = batch
        count = len(batch.sizes)
        if count not in self.shares:
            self.shares[count] = Share.make(count, self.job.slots, self.layout.dp)
        self.share = self.shares[count]
        low, high = self.share.microbatches[self.dp_index]
        self.local = list(range(low, high))
        self.first = self.local[0] if self.local else 0
        self.captures: dict[int, tuple[Any, Staged, dict[int, StageState]]] = {}
        self.staged = self.capture(self.first)[1]
        self.cells: dict[tuple[int, int, int], Cell] = {}
        self.incoming: dict[tuple[int, ...], Values] = {}
        self.outgoing: dict[tuple[int, int], Values] = {}
        self.rows: dict[tuple[int, int], Any] = {}
        self.tensors: dict[Site, Tensor] = {}
        self.begun: set[Any] = set()
        self.stage_views: dict[tuple[int, int], Any] = {}
        self.whole_loss: Any = None
        self.program, self.in_pairs = self._program()
        self.messages.begin()
        self.losses.begin()

    def _release(self) -> None:
        """Let go of the step's data, activations and gradients, so that the next step gets the same memory."""
        self.batch.loaded.clear()
        held: tuple[dict[Any, Any], ...] = (
            *(self.cells, self.incoming, self.outgoing, self.rows),
            *(self.tensors, self.stage_views, self.captures),
        )
        for table in held:
            table.clear()
        self.whole_loss = None
        self.gradients.release()

    def _program(self) -> tuple[tuple[Action, ...], bool]:
        """Give this rank's program, and whether it is forward and backward of one whole model in turns."""
        segments = tuple(len(s) for s in self.staged.stages)
        coupled = self.weigher.kind == "batch" and len(self.batch.sizes) > 1
        key = (len(self.local), segments, coupled)
        if key not in self.book.programs:
            programs = build_program(
                self.layout.schedule,
                num_ranks=self.layout.pp,
                num_microbatches=len(self.local),
                virtual=self.layout.virtual,
                segments=segments,
                couple_loss=coupled,
                tail=False,
            )
            mine = programs[self.pp_index]
            turns = [a for m in range(len(self.local)) for a in (Action(Op.FORWARD, 0, m), Action(Op.BACKWARD, 0, m))]
            self.book.programs[key] = (mine, list(mine) == turns and not self.layout.recompute)
        found: tuple[tuple[Action, ...], bool] = self.book.programs[key]
        return found

    # ---- captures ------------------------------------------------------------------------------------

    def capture(self, m: int) -> tuple[Any, Staged, dict[int, StageState]]:
        """Give the key, the cut graph and this rank's stages of a microbatch, looked up once a step."""
        if m not in self.captures:
            key, staged = self.book.staged(self.batch.microbatch(m), coupled=len(self.batch.sizes) > 1)
            self.captures[m] = (key, staged, self.stages_for(key, staged))
        return self.captures[m]

    def stages_for(self, key: Any, staged: Staged) -> dict[int, StageState]:
        """Give this rank's stage states for one capture."""
        if key not in self.states:
            self.states[key] = {s: StageState(self.model, staged, s) for s in self.my_stages}
        return self.states[key]

    def state(self, stage: int, m: int) -> tuple[Any, Staged, StageState]:
        """Give a microbatch's inputs, its cut graph and a stage's state, begun for this step."""
        if (stage, m) in self.stage_views:
            return self.stage_views[stage, m]  # type: ignore[no-any-return]
        inputs = self.book.inputs(self.batch.microbatch(m))
        _, staged, states = self.capture(m)
        state = states[stage]
        if id(state) not in self.begun:
            if staged.sites(stage) != self.staged.sites(stage):
                raise mixed_step(self.step_index)
            state.begin(self.tensors)
            self.begun.add(id(state))
        self.stage_views[stage, m] = (inputs, staged, state)
        return inputs, staged, state

    # ---- actions -------------------------------------------------------------------------------------

    def _run(self, action: Action) -> Steps:
        stage, m = action.stage, self.local[action.microbatch] if action.microbatch >= 0 else -1
        self.where = f"stage {stage}, microbatch {m}" if m >= 0 else f"stage {stage}"
        if action.op not in FORWARD_OPS:
            yield from self.gradients.wait_for_replicas()
        match action.op:
            case Op.FORWARD:
                self._forward(stage, m, action.segment)
            case Op.BACKWARD:
                self._backward(stage, m, action.segment)
            case Op.BACKWARD_INPUT:
                self._backward_input(stage, m)
            case Op.BACKWARD_WEIGHT:
                cell = self.cells.pop((stage, m, 0))
                self.gradients.aim(stage, m, 0)
                self.gradients.collect(stage, m, 0, self.state(stage, m)[2].backward_weight(cell))
            case Op.SEND_ACTIVATION:
                self.messages.send(action, self.outgoing.pop((stage, m)))
            case Op.SEND_GRADIENT:
                self.messages.send(action, self.outgoing.pop((-stage, m)))
            case Op.RECEIVE_ACTIVATION:
                self.incoming[stage, m] = yield from self.messages.receive(action)
            case Op.RECEIVE_GRADIENT:
                self.incoming[-stage - 1, m] = yield from self.messages.receive(action)
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
            self.first_state(stage)
        for stage, k in rows:
            yield from couple_forward(self, stage, k)
        if self.weigher.kind == "batch" and self.my_stages[-1] == self.layout.num_stages - 1:
            yield from couple_loss(self)
        yield from self.gradients.wait_for_replicas()
        for stage, k in reversed(rows):
            yield from couple_backward(self, stage, k)

    def first_state(self, stage: int) -> StageState:
        """Give a stage's state for this replica's first microbatch (the step's first, where it has none)."""
        return self.state(stage, self.first)[2]

    def seeder(self, m: int) -> Any:
        """Give the function that seeds random numbers by (seed, step, microbatch, unit)."""
        seed, step = self.job.seed, self.step_index
        generator = torch.default_generator

        def seed_unit(unit: int, host: bool = False) -> None:
            value = mix(seed, step, m, unit)
            generator.manual_seed(value)
            if self.device.type != "cpu":
                torch.manual_seed(value)
            if host:  # modules that run as a whole may draw from these too
                random.seed(value)
                numpy.random.seed(value % (1 << 32))

        return seed_unit

    def _forward(self, stage: int, m: int, k: int) -> None:
        inputs, staged, state = self.state(stage, m)
        takes = self._takes(stage, m, k)
        cell = self._forward_cell(inputs, state, stage, m, k, takes)
        last = k == len(staged.stages[stage]) - 1
        if last and stage == self.layout.num_stages - 1:
            self._evaluate_loss(inputs, staged, cell, m)
        elif last and (stage + 1) % self.layout.pp != self.pp_index:
            self.outgoing[stage, m] = cell.gives
        if self.layout.recompute and not last:
            cell.gives = hand_over(cell.gives)
        if self.layout.recompute:
            gives = hand_over(cell.gives)
            loss = None if cell.loss is None else cell.loss.detach()
            cell = Cell(takes=takes, gives=gives, loss=loss, rows=cell.rows, whole=cell.whole)
        self.cells[stage, m, k] = cell

    def _takes(self, stage: int, m: int, k: int) -> Values:
        if k > 0:
            return hand_over(self.cells[stage, m, k - 1].gives)
        if stage == 0:
            return ()
        if (stage, m) in self.incoming:
            return self.incoming.pop((stage, m))
        previous = self.cells[stage - 1, m, len(self.staged.stages[stage - 1]) - 1]
        return hand_over(previous.gives)

    def _forward_cell(self, inputs: Inputs, state: StageState, stage: int, m: int, k: int, takes: Values) -> Cell:
        row = self.rows.get((stage, k - 1)) if k > 0 else None
        rows = None if row is None else row.as_buffers(state.segments[k].row.dtype)  # type: ignore[union-attr]
        with self.book.autocast():
            return state.forward(
                k,
                inputs,
                takes,
                batch=self.batch.sizes[m],
                seed=self.seeder(m) if state.staged.draws else None,
                rows=rows,
                key=(m, k),
            )

    def _evaluate_loss(self, inputs: Inputs, staged: Staged, cell: Cell, m: int) -> None:
        output = rebuild_output(staged, cell.gives, cell.whole, inputs)
        if self.weigher.kind == "batch" and len(self.batch.sizes) > 1:
            cell.whole = output
            return
        if self.loss_draws:
            self.seeder(m)(1 << 20)
        weight = self.losses.weights[m]
        with self.book.autocast():
            loss = self.loss(output, inputs.data)
        self.losses.values[m] = loss.detach()
        if weight == 0.0:
            loss = sum(t.sum() * 0.0 for t in leaves(output) if isinstance(t, Tensor) and t.requires_grad)  # type: ignore[assignment]
        cell.loss = loss if weight == 1.0 else loss * weight
        cell.whole = None

    def _gives_grads(self, stage: int, m: int, k: int, cell: Cell) -> Values:
        if k < len(self.staged.stages[stage]) - 1:
            return self.incoming.pop((stage, m, k))
        if stage == self.layout.num_stages - 1:
            return self.whole_loss.grads(m) if self.whole_loss is not None else ()
        return self.incoming.pop((-stage - 1, m))

    def _again(self, stage: int, m: int, k: int, cell: Cell) -> Cell:
        """Run a cell's forward again where activations were not kept."""
        inputs, staged, state = self.state(stage, m)
        again = self._forward_cell(inputs, state, stage, m, k, cell.takes)
        if stage == self.layout.num_stages - 1 and k == len(staged.stages[stage]) - 1:
            self._evaluate_loss(inputs, staged, again, m)
        return again

    def _backward(self, stage: int, m: int, k: int) -> None:
        cell = self.cells.pop((stage, m, k))
        grads = self._gives_grads(stage, m, k, cell)
        if self.layout.recompute:
            cell = self._again(stage, m, k, cell)
        self.gradients.armed = self.gradients.arm(m)
        self.gradients.aim(stage, m, k)
        taken, leaf_grads = self.state(stage, m)[2].backward(cell, grads)
        self.gradients.armed = False
        self._pass_down(stage, m, k, taken)
        self.gradients.collect(stage, m, k, leaf_grads)

    def _backward_input(self, stage: int, m: int) -> None:
        cell = self.cells[stage, m, 0]
        grads = self._gives_grads(stage, m, 0, cell)
        if self.layout.recompute:
            cell = self.cells[stage, m, 0] = self._again(stage, m, 0, cell)
        self.gradients.aim(stage, m, 0)
        taken = self.state(stage, m)[2].backward_input(cell, grads)
        self._pass_down(stage, m, 0, taken)

    def _pass_down(self, stage: int, m: int, k: int, taken: Values) -> None:
        if k > 0:
            self.incoming[stage, m, k - 1] = taken
        elif stage > 0 and (stage - 1) % self.layout.pp == self.pp_index:
            self.incoming[-stage, m] = taken
        elif stage > 0:
            self.outgoing[-stage, m] = taken


def hand_over(values: Values) -> Values:
    """Cut autograd between two cells of one rank: the same memory, new leaves."""
    return tuple(
        v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v for v in values
    )


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

    output = staged.graph.output
    return values.get(output.index) if isinstance(output, Value) else map_leaves(find, output)
