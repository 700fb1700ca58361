"""Capture a plain module as a graph that runs at any batch size.

The forward is run for real on small batches while every torch call is recorded (no export, no rewrite, no
symbolic values). Numbers that differ between the traces are sizes: each must be ``scale * batch + offset``.
A module whose Python looks at tensor values, or whose calls differ between the traces in another way, is
*opaque*: it is recorded as one call and later run as the user wrote it. A test on the data whose other
outcome only raises is a check: the graph repeats it. When the whole model would be opaque, or the graph,
run beside the forward, gives other numbers, it is ``blocked``: it trains under dp and cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..tree import leaves, map_leaves
from .align import agree, align
from .graph import REFS, Graph, Input, Node, Ref, Value
from .keep import as_in_export, changed_attributes, kept_state, python_state
from .looks import hooked
from .patches import patched_calls
from .recorder import Recorder
from .selfcheck import difference
from .trace import DataDependence, ReadKey, Trace
from .watch import Watch, is_fake

Forward = Callable[[nn.Module, Any], Any]
MAX_ATTEMPTS = 256
TRACE_SIZES = (2, 3)


def capture(
    model: nn.Module,
    forward: Forward,
    batch: Any,
    *,
    num_samples: int,
    use: Any = None,
    exact: bool = False,
) -> Graph:
    """Capture ``forward(model, batch)`` in the mode (train or eval) the model is in.

    ``batch`` holds ``num_samples`` samples; tensors whose first dim is ``num_samples`` are per-sample.
    ``use(output, batch)`` (the loss), when given, tells which outputs are used. An ``exact`` graph holds for
    ``num_samples`` alone, of a forward that does something else there; ask :func:`holds_for` about any other. The
    model's state, its buffers and the random state are left as they were. Every rank calls it on one model.
    """
    task = _Task(model=model, forward=forward, batch=batch, num_samples=num_samples, use=use)
    sizes = (num_samples, num_samples) if exact else TRACE_SIZES
    checked = num_samples if exact else max(num_samples, TRACE_SIZES[0])
    for _ in range(MAX_ATTEMPTS):
        try:
            graph = task.attempt(sizes)
        except DataDependence as stop:
            if stop.read is not None and task.is_check(stop.read):
                continue
            if not task.make_opaque(stop):
                return blocked_graph(model, forward, batch, stop)
            continue
        if any(is_fake(leaf) for leaf in leaves(batch)):
            return graph  # there are no numbers to compare
        why = difference(graph, model, forward, resize_batch(batch, num_samples, checked), checked)
        return blocked_graph(model, forward, batch, DataDependence("", why)) if why else graph
    raise AssertionError(f"capture did not settle: {task.opaque}")


def holds_for(graph: Graph, model: nn.Module, forward: Forward, batch: Any, *, num_samples: int) -> bool:
    """Tell whether a graph holds for a batch of ``num_samples``, or the forward does something else there."""
    if graph.blocked or (num_samples < TRACE_SIZES[0] and any(n.row is not None for n in graph.nodes)):
        return True  # a batch norm refuses a sample alone
    task = _Task(model=model, forward=forward, batch=batch, num_samples=num_samples, use=None)
    task.opaque.update(graph.opaque)
    task.checks.update(graph.checks)
    try:
        with kept_state(model), as_in_export():
            agree(graph, task.trace(num_samples))
    except DataDependence:
        return False
    return True


@dataclass(kw_only=True)
class _Task:
    """Hold what is to be captured, and what has been found out so far."""

    model: nn.Module
    forward: Forward
    batch: Any
    num_samples: int
    use: Any
    hooks: dict[str, str] = field(default_factory=dict)  # module path -> why it must run as it is
    opaque: dict[str, str] = field(default_factory=dict)  # module path -> why it is run as a whole
    checks: dict[ReadKey, Exception] = field(default_factory=dict)  # tests whose other outcome only raises
    explored: set[ReadKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        found = ((path, hooked(module)) for path, module in self.model.named_modules())
        self.hooks = {path: why for path, why in found if why}

    def attempt(self, sizes: Sequence[int]) -> Graph:
        """Trace at every size and make one graph of the traces."""
        with kept_state(self.model), as_in_export():
            traces = [self.trace(sizes[0], use=self.use)]
            before = python_state(self.model)
            traces += [self.trace(size, use=self.use, backwards=True) for size in sizes[1:]]
            for path, name in changed_attributes(self.model, before):
                if any(path == o or path.startswith(f"{o}.") for o in self.opaque):
                    continue
                raise DataDependence(path, f"its forward changes its own attribute {name!r}")
        nodes = align(traces)
        first, model = traces[0], self.model
        inner = {path: model.get_submodule(path) for path in {n.opaque for n in nodes if n.opaque}}
        return Graph(
            nodes=nodes,
            values=first.values,
            constants=tuple(c.detach().clone() for c in first.constants),
            output=first.output,
            used_outputs=first.used,
            rebinds=first.rebinds,
            training=model.training,
            opaque=dict(self.opaque),
            checks=dict(self.checks),
            module_params={p: _names(model, p, m.named_parameters()) for p, m in inner.items()},
            module_buffers={p: _names(model, p, m.named_buffers()) for p, m in inner.items()},
        )

    def trace(self, size: int, *, use: Any = None, flip: ReadKey | None = None, backwards: bool = False) -> Trace:
        """Record one forward of ``size`` samples, the batch's last ones first where ``backwards``."""
        batch = resize_batch(self.batch, self.num_samples, size, backwards=backwards)
        recorder = self.recorder(batch, size, flip)
        return _record(recorder, self.model, self.forward, batch, use)

    def recorder(self, batch: Any, size: int, flip: ReadKey | None) -> Recorder:
        """Make a recorder that knows what has been found out so far."""
        return Recorder(
            self.model,
            leaves(batch),
            opaque=self.opaque,
            hooks=self.hooks,
            num_samples=size,
            checks=self.checks,
            flip=flip,
        )

    def is_check(self, read: ReadKey) -> bool:
        """Try the other outcome of a test on the data: a graph can repeat the test where that only raises."""
        if read in self.explored:
            return False
        self.explored.add(read)
        batch = resize_batch(self.batch, self.num_samples, TRACE_SIZES[0])
        with kept_state(self.model), as_in_export():
            recorder = self.recorder(batch, TRACE_SIZES[0], read)
            try:
                _record(recorder, self.model, self.forward, batch, None)
            except DataDependence:
                return False
            except Exception as error:  # noqa: BLE001  whatever the forward raises is the answer
                if recorder.calls_since_flip != 0:
                    return False
                self.checks[read] = error.with_traceback(None)
                return True
        return False

    def make_opaque(self, stop: DataDependence) -> bool:
        """Have a module, and those of its class, run as a whole; False when that would be the whole model."""
        path = stop.module
        while path in self.opaque:
            path = path.rpartition(".")[0]
        if path == "":
            return False
        kind = type(self.model.get_submodule(path))
        for other, module in self.model.named_modules():
            if other and type(module) is kind and kind not in (nn.Sequential, nn.ModuleList):
                self.opaque.setdefault(other, stop.why)
        self.opaque[path] = stop.why
        return True


def _names(model: nn.Module, path: str, inner: Iterator[tuple[str, Tensor]]) -> tuple[str, ...]:
    first = {id(t): n for n, t in (*model.named_buffers(), *model.named_parameters())}
    return tuple(first[id(t)] for _, t in inner)


def resize_batch(batch: Any, num_samples: int, size: int, *, backwards: bool = False) -> Any:
    """Take ``size`` samples of a batch of ``num_samples``, repeating samples where it has too few."""
    index = [(num_samples - 1 - i if backwards else i) % num_samples for i in range(size)]

    def resize(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == num_samples:
            return leaf[index].clone()
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(resize, batch)


def _record(recorder: Recorder, model: nn.Module, forward: Forward, batch: Any, use: Any) -> Trace:
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    with patched_calls(recorder), Watch(recorder), recorder:
        output = forward(model, batch)
    recorder.check_foreign_random()
    if recorder.stopped is not None:  # a forward that caught it must not go on with it
        raise recorder.stopped
    recorder.trace.output = map_leaves(lambda leaf: _output_leaf(recorder, leaf), output)
    for name, buffer in model.named_buffers():
        if id(buffer) != buffers.get(name):
            recorder.trace.rebinds[name] = recorder.info(buffer).ref
    _check_changed_inputs(recorder, leaves(recorder.trace.output), "the model returns")
    if use is not None:
        recorder.trace.used = _used_outputs(recorder, output, batch, use)
    return recorder.trace


def _check_changed_inputs(recorder: Recorder, refs: Sequence[Any], who: str) -> None:
    """Refuse a changed batch that is looked at afterwards: other stages hold the batch as it was."""
    changed = {ref for node in recorder.trace.nodes for ref in node.mutates if isinstance(ref, Input)}
    if changed & {ref for ref in refs if isinstance(ref, Input)}:
        raise DataDependence("", f"{who} a tensor of the batch, which the forward changes in place")


def _output_leaf(recorder: Recorder, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return recorder.info(leaf).ref
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    return None  # an object that cannot be carried between stages (a cache, say)


class _Touched(torch.overrides.TorchFunctionMode):
    """Note which tensor objects are ever an argument of a torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the arguments and run the call."""
        self.note((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def note(self, value: Any) -> None:
        """Note the tensors inside nested values."""
        self.seen.update((id(leaf), leaf) for leaf in leaves(value) if isinstance(leaf, Tensor))


def _used_outputs(recorder: Recorder, output: Any, batch: Any, use: Any) -> frozenset[int] | None:
    """Find the values among the model's outputs that the loss touches (None: cannot tell, keep all)."""
    touched = _Touched()
    try:
        with touched:
            touched.note(use(output, batch))
    except Exception:  # noqa: BLE001  the loss has its own say later, on a real microbatch
        return None
    known = [recorder.infos[key].ref for key in touched.seen if key in recorder.infos]
    _check_changed_inputs(recorder, known, "the loss uses")
    given = {id(t): recorder.infos[id(t)].ref for t in leaves(output) if isinstance(t, Tensor)}
    for key in touched.seen:
        if key not in given and key in recorder.infos and isinstance(recorder.infos[key].ref, Value):
            raise DataDependence("", "the loss uses a tensor of the forward that the model does not return")
    return frozenset(r.index for key, r in given.items() if key in touched.seen and isinstance(r, Value))


# ---- a model that cannot be looked into -----------------------------------------------------------


def blocked_graph(model: nn.Module, forward: Forward, batch: Any, stop: DataDependence) -> Graph:
    """Make the graph of one node that runs the whole forward as the user wrote it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            stop.why += f'; "{name}" is a BatchNorm inside it'
    count = sum(isinstance(leaf, Tensor) for leaf in leaves(batch))

    def run(data: Any) -> Any:
        return forward(model, data)

    run.__name__ = "forward"
    node = Node(
        target=run,
        args=tuple(Input(i) for i in range(count)),
        kwargs={},
        outputs=(),
        module="",
        call=0,
        grad=True,
        random=True,
        opaque="<model>",
    )
    return Graph(
        nodes=(node,),
        values={},
        constants=(),
        output=None,
        used_outputs=None,
        rebinds={},
        training=model.training,
        blocked=f"{f'module {stop.module!r}' if stop.module else type(model).__name__}: {stop.why}",
        module_params={"<model>": tuple(n for n, _ in model.named_parameters())},
        module_buffers={"<model>": tuple(n for n, _ in model.named_buffers())},
    )


def output_refs(graph: Graph) -> list[Ref]:
    """List the references in the model's output, in the order of its leaves."""
    return [leaf for leaf in leaves(graph.output) if isinstance(leaf, REFS)]
