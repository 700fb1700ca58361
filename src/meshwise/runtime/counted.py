"""Count what every unit of a model does and keeps: each unit is run by itself, forward and backward, on fake tensors.

Nothing is timed and no memory is taken, so this also serves for models and devices that are not here.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cost.profile import ParameterProfile, Profile, UnitProfile, Work
from ..errors import JobError
from ..job import Job
from ..model.capture import capture
from ..model.fake import as_fake, fake_mode, faked
from ..model.graph import Graph
from ..model.inputs import Inputs
from ..model.stages import Staged, build_stages
from ..model.tracker import Operation, Tracker
from ..model.units import analyse, find_units
from ..model.watch import storage_of
from ..tree import leaves
from .book import forward_names
from .cells import Cell, StageState, Values
from .losses import Loss, call_forward, count_samples, loss_of
from .repeats import Given, Repeats, give_again, given_by, meta_of
from .update import build_optimizer


def unit_stages(job: Job, graph: Graph) -> Staged:
    """Cut a graph at every unit."""
    count = len(find_units(graph, analyse(graph)))
    statistics = "microbatch" if job.batch_norm == "microbatch" else "batch"
    return build_stages(graph, count, coupled=False, statistics=statistics)


def count_model(job: Job, model: nn.Module, batch: Any, *, graph: Graph | None = None) -> Profile:
    """Count a model on one microbatch; ``graph`` is its capture, if there is one (else it is captured here).

    Parameters, buffers and the batch may be real, fake or on the meta device; none is read or changed. Raises JobError
    when the forward needs values (then it can only be counted by running it).
    """
    return count_sizes(job, model, [batch], graph=graph)[0]


def count_sizes(job: Job, model: nn.Module, batches: Sequence[Any], *, graph: Graph | None = None) -> list[Profile]:
    """Count a model on microbatches of several sizes; see :func:`count_model`."""
    mode = fake_mode()
    with faked(model, mode), mode:
        found = [as_fake(batch, mode) for batch in batches]
        forward, loss = call_forward(job, forward_names(model)), loss_of(job)
        with _casting(job):
            first = found[0]
            graph = graph or capture(model, forward, first, num_samples=count_samples(first), use=loss)
            staged = unit_stages(job, graph)
            runs = [UnitRun(job, model, staged, data, loss) for data in found]
            units = [run.all_units() for run in runs]
        parameters = _parameters(job, model)
        buffers = {n: b.numel() * b.element_size() for n, b in model.named_buffers()}
    return [
        Profile(
            microbatch_size=count_samples(data),
            units=each,
            parameters=parameters,
            buffers=buffers,
            buffer_bytes=sum(buffers.values()),
            batch_bytes=float(sum(t.numel() * t.element_size() for t in leaves(data) if isinstance(t, Tensor))),
            uncounted=run.uncounted,
            blocked=graph.blocked or "",
            notes=tuple(_notes(graph)),
        )
        for data, run, each in zip(found, runs, units, strict=True)
    ]


def _casting(job: Job) -> contextlib.AbstractContextManager[Any]:
    if job.precision == "bf16":
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    return contextlib.nullcontext()


def _notes(graph: Graph) -> Iterator[str]:
    if graph.blocked:
        yield f"the model runs as a whole (dp only): {graph.blocked}"
    yield from (f'module "{path}" runs as a whole: {why}' for path, why in sorted(graph.opaque.items()))


@dataclass(kw_only=True)
class _Tally:
    """Add up the operations of one unit, by name, kind and dtype."""

    count: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    ahead: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    flops: dict[Any, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    moved: dict[Any, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))

    def add(self, operation: Operation, phase: int) -> None:
        key = (operation.name, operation.kind, operation.dtype, operation.shape)
        self.count[key] += phase != INPUT
        self.ahead[key] += phase == FORWARD
        self.flops[key][phase] += operation.flops
        self.moved[key][phase] += operation.num_bytes

    def work(self) -> tuple[Work, ...]:
        found = []
        for key, number in self.count.items():
            name, kind, dtype, shape = key
            forward, for_input, whole = self.flops[key]
            found.append(
                Work(
                    op=name,
                    kind=kind,
                    count=number,
                    forward_count=self.ahead[key],
                    dtype=dtype,
                    shape=shape,
                    forward_flops=forward,
                    backward_input_flops=for_input,
                    backward_weight_flops=max(0.0, whole - for_input),
                    forward_bytes=self.moved[key][0],
                    backward_bytes=self.moved[key][2],
                )
            )
        return tuple(found)


FORWARD, INPUT, WHOLE = 0, 1, 2  # phases of a unit: forward, backward towards its input alone, whole backward


class UnitRun:
    """Run the units of a model one after the other, forward and then backward, and note what each does."""

    def __init__(self, job: Job, model: nn.Module, staged: Staged, data: Any, loss: Loss) -> None:
        self.job, self.model, self.staged, self.data, self.loss = job, model, staged, data, loss
        self.inputs = Inputs(data)
        count = len(staged.stages)
        self.states: dict[int, StageState] = {}  # of the units that are run
        self.tensors: dict[Any, Tensor] = {}
        self.repeats = Repeats(staged.graph)
        self.named = dict(model.named_parameters(remove_duplicate=False))
        self.same = list(range(count))  # the unit that each repeats
        self.given: dict[int, tuple[Given, ...]] = {}
        self.tallies = [_Tally() for _ in range(count)]
        self.unknown = [Counter[str]() for _ in range(count)]
        self.at, self.phase = 0, FORWARD
        held = [*model.parameters(), *model.buffers(), *self.inputs, *staged.graph.constants]
        self.tracker = Tracker([t for t in held if isinstance(t, Tensor)], note=self._note)
        self.saved: set[int | None] = set()
        self.fresh: list[Tensor] = []  # saved by the unit that runs now, and by none before
        self.cells: list[Cell] = []

    def _note(self, operation: Operation) -> None:
        self.tallies[self.at].add(operation, self.phase)
        if operation.kind == "uncounted" and self.phase != INPUT:
            self.unknown[self.at][operation.name] += 1

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        if storage not in self.saved and self.tracker.size(tensor):
            self.saved.add(storage)
            self.fresh.append(tensor)
        return tensor

    def all_units(self) -> tuple[UnitProfile, ...]:
        """Run all units and give what was noted."""
        count = len(self.staged.stages)
        facts: dict[int, dict[str, float]] = {}
        backwards: dict[int, float] = {}
        with self.tracker:
            for u in range(count):
                takes = _detached(self.cells[-1].gives) if u else ()
                self.same[u] = self._find(u, takes)
                if self.same[u] == u:
                    facts[u] = self._forward(u, takes)
                else:
                    given = self.given[self.same[u]]
                    self.cells.append(Cell(takes=takes, gives=give_again(given, takes, self.saved)))
            grads: Values = ()
            for u in reversed(range(count)):
                if self.same[u] == u:
                    if u + 1 < count and self.same[u + 1] != u + 1:
                        grads = _like(self.cells[-1].gives)
                    backwards[u], grads = self._backward(u, grads)
                else:
                    self.cells.pop()
        return tuple(self._profile(u, facts[first], backwards[first]) for u, first in enumerate(self.same))

    @property
    def uncounted(self) -> dict[str, int]:
        """Count the operations nothing is known about."""
        return dict(sum((self.unknown[first] for first in self.same), Counter()))

    def _find(self, u: int, takes: Values) -> int:
        """Give the unit that this one repeats; the last one, with the loss, is always run."""
        (segment,) = self.staged.stages[u]
        unit = self.staged.units[u]
        nodes = self.staged.graph.nodes[unit.start : unit.stop]
        leaves = [meta_of(self.named.get(site[0])) for site in segment.sites]
        first = self.repeats.find(u, nodes, segment, takes, leaves)
        return u if u == len(self.same) - 1 else first

    def _state(self, u: int) -> StageState:
        if u not in self.states:
            self.states[u] = state = StageState(self.model, self.staged, u)
            state.begin(self.tensors)
            self.tracker.known |= {storage_of(t) for t in self.tensors.values()}
        return self.states[u]

    def _forward(self, u: int, takes: Values) -> dict[str, float]:
        self.at, self.phase, self.fresh = u, FORWARD, []
        state = self._state(u)
        before = {storage_of(t) for t in takes if t is not None}
        begun = self.tracker.begin()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            cell = state.forward(
                0, self.inputs, takes, batch=count_samples(self.data), seed=_no_seed, rows=None, key=(0, u)
            )
            if u == len(self.same) - 1:
                cell.loss = self.loss(self._output(cell), self.data)
        self.cells.append(cell)
        self.given[u] = given_by(takes, cell.gives, self.saved)
        new = [t for t in self.fresh if storage_of(t) not in before]
        taken = [t for t in self.fresh if storage_of(t) in before]
        size = self.tracker.size
        unsaved = {storage_of(t): size(t) for t in cell.gives if t is not None and storage_of(t) not in self.saved}
        return {
            "saved_bytes": sum(map(size, new)),
            "saved_input_bytes": sum(map(size, taken)),
            "forward_peak_bytes": self.tracker.peak - begun,
            "boundary_bytes": sum(_num_bytes(t) for t in cell.gives) if cell.loss is None else 0,
            "boundary_grad_bytes": sum(_num_bytes(t) for t in cell.gives if t is not None and t.requires_grad)
            if cell.loss is None
            else 0,
            "boundary_unsaved_bytes": sum(unsaved.values()),
        }

    def _output(self, cell: Cell) -> Any:
        from .engine import rebuild_output

        return rebuild_output(self.staged, cell.gives, cell.whole, self.inputs)

    def _backward(self, u: int, grads: Values) -> tuple[float, Values]:
        """Run a unit's backward; give its peak and the gradients of what it took."""
        cell, state = self.cells.pop(), self.states[u]
        self.at = u
        wanted = [t for t in cell.takes if t is not None and t.requires_grad]
        self.phase = INPUT
        if wanted:
            _try_input(cell, grads, wanted)
        self.phase = WHOLE
        begun = self.tracker.begin()
        taken, leaf_grads = state.backward(cell, grads)
        peak = self.tracker.peak - begun
        del leaf_grads, cell, grads
        for leaf in state.tensors.values():
            leaf.grad = None
        return float(peak), taken

    def _profile(self, u: int, facts: dict[str, Any], backward_peak: float) -> UnitProfile:
        unit = self.staged.units[u]
        path, call = unit.key
        nodes = self.staged.graph.nodes[unit.start : unit.stop]
        return UnitProfile(
            name=path + (f"#{call + 1}" if call else ""),
            params=unit.params,
            work=self.tallies[self.same[u]].work(),
            backward_peak_bytes=backward_peak,
            is_row=any(n.row is not None for n in nodes) and self.job.batch_norm == "batch",
            **facts,
        )


def _like(values: Values) -> Values:
    """Make gradients of values whose reader was not run."""
    return tuple(None if t is None or not t.requires_grad else torch.empty_like(t) for t in values)


def _no_seed(unit: int, host: bool = False) -> None:
    """Seed nothing: no number is ever drawn."""


def _try_input(cell: Cell, grads: Values, wanted: list[Tensor]) -> None:
    from .cells import roots

    outs, out_grads = roots(cell, grads)
    if outs:
        torch.autograd.grad(outs, wanted, out_grads, allow_unused=True, retain_graph=True)


def _detached(values: Values) -> Values:
    return tuple(v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v for v in values)


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


# ---- parameters and what the optimizer keeps for them ------------------------------------------------


def _parameters(job: Job, model: nn.Module) -> dict[str, ParameterProfile]:
    state = optimizer_bytes(job, model)
    return {
        name: ParameterProfile(
            name=name,
            num_elements=p.numel(),
            num_bytes=p.numel() * p.element_size(),
            trainable=p.requires_grad,
            optimizer_bytes=state.get(name, 0),
            shape=tuple(p.shape),
        )
        for name, p in model.named_parameters()
    }


def optimizer_bytes(job: Job, model: nn.Module) -> dict[str, int]:
    """Ask the job's optimizer what it keeps for each parameter: it makes one step on parameters without memory.

    Raises JobError when it cannot step on such.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), _on_meta(model) as names:
        try:
            optimizer = build_optimizer(job, model)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.empty_like(p) if p.requires_grad else None
            optimizer.step()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise JobError(f"what the optimizer keeps cannot be found out without values: {error}") from error
        return {names[id(p)]: _state_bytes(state) for p, state in optimizer.state.items() if id(p) in names}


@contextlib.contextmanager
def _on_meta(model: nn.Module) -> Iterator[dict[int, str]]:
    """Stand parameters on the meta device in for the model's while this is open; give their names."""
    held = [(m, dict(m._parameters)) for m in model.modules()]
    made: dict[int, nn.Parameter] = {}

    def stand_in(p: nn.Parameter) -> nn.Parameter:
        if id(p) not in made:
            empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
            made[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
        return made[id(p)]

    try:
        for module, parameters in held:
            module._parameters.update({k: p if p is None else stand_in(p) for k, p in parameters.items()})
        yield {id(p): name for name, p in model.named_parameters()}
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)


def _state_bytes(state: Any) -> int:
    tensors: Sequence[Tensor] = [t for t in leaves(state) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
