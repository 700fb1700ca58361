"""Capture a plain module as a graph that runs at any batch size.

The forward is run for real on two small batches while every torch call is recorded (no export, no
rewrite, no symbolic values). Numbers that differ between the two traces are sizes: each must be
``scale * batch + offset``. A module whose Python looks at tensor values, or whose calls differ between
the two traces in another way, is *opaque*: it is recorded as one call and later run as the user wrote it.
When that is the whole model, the graph is ``blocked``: it trains under dp and cannot be cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..tree import leaves, map_leaves, replace_leaves
from .graph import REFS, Affine, Graph, Input, Node, Ref, Value
from .recorder import DataDependence, Recorder, Trace, patched_calls

Forward = Callable[[nn.Module, Any], Any]
MAX_ATTEMPTS = 64
TRACE_SIZES = (2, 3)


def capture(model: nn.Module, forward: Forward, batch: Any, *, num_samples: int, use: Any = None) -> Graph:
    """Capture ``forward(model, batch)`` in the mode (train or eval) the model is in.

    ``batch`` holds ``num_samples`` samples; tensors whose first dim is ``num_samples`` are per-sample.
    ``use(output, batch)`` (the loss), when given, tells which outputs are used. The model's state, its
    buffers and the random state are left as they were. Every rank calls it on the same model.
    """
    opaque: dict[str, str] = {}
    with kept_state(model), _as_in_export():
        for _ in range(MAX_ATTEMPTS):
            try:
                return _capture_once(model, forward, batch, num_samples, use, opaque)
            except DataDependence as stop:
                if stop.module == "" or stop.module in opaque:
                    return blocked_graph(model, forward, batch, stop)
                _make_opaque(model, opaque, stop)
    raise AssertionError(f"capture did not settle: {opaque}")


def _make_opaque(model: nn.Module, opaque: dict[str, str], stop: DataDependence) -> None:
    kind = type(model.get_submodule(stop.module))
    for path, module in model.named_modules():
        if path and type(module) is kind and kind is not nn.Sequential:
            opaque[path] = stop.why
    opaque[stop.module] = stop.why


def _capture_once(
    model: nn.Module, forward: Forward, batch: Any, num_samples: int, use: Any, opaque: dict[str, str]
) -> Graph:
    small, large = TRACE_SIZES
    first = _record(model, forward, resize_batch(batch, num_samples, small), small, use, opaque, extreme=0.0)
    again = _record(
        model, forward, resize_batch(batch, num_samples, large), large, None, opaque, extreme=1 - 1e-7
    )
    nodes = _align(first, again)
    inner = {path: model.get_submodule(path) for path in {n.opaque for n in nodes if n.opaque}}
    return Graph(
        nodes=nodes,
        values=first.values,
        constants=tuple(c.detach().clone() for c in first.constants),
        output=_check_output(first, again),
        used_outputs=getattr(first, "used", None),
        rebinds=first.rebinds,
        training=model.training,
        opaque=dict(opaque),
        module_params={p: _names(model, p, m.named_parameters()) for p, m in inner.items()},
        module_buffers={p: _names(model, p, m.named_buffers()) for p, m in inner.items()},
    )


def _names(model: nn.Module, path: str, inner: Iterator[tuple[str, Tensor]]) -> tuple[str, ...]:
    first = {id(t): n for n, t in (*_named(model.named_buffers()), *_named(model.named_parameters()))}
    return tuple(first[id(t)] for _, t in inner)


def _named(items: Iterator[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return list(items)


def resize_batch(batch: Any, num_samples: int, size: int) -> Any:
    """Take ``size`` samples of a batch of ``num_samples``, repeating samples where it has too few."""
    index = [i % num_samples for i in range(size)]

    def resize(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == num_samples:
            return leaf[index].clone()
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(resize, batch)


def _record(
    model: nn.Module,
    forward: Forward,
    batch: Any,
    size: int,
    use: Any,
    opaque: dict[str, str],
    *,
    extreme: float,
) -> Trace:
    recorder = Recorder(model, leaves(batch), opaque=opaque, extreme=extreme, num_samples=size)
    before = _python_state(model)
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    with patched_calls(recorder), recorder:
        output = forward(model, batch)
    _check_python_state(model, before)
    recorder.trace.output = map_leaves(lambda leaf: _output_leaf(recorder, leaf), output)
    for name, buffer in model.named_buffers():
        if id(buffer) != buffers.get(name):
            recorder.trace.rebinds[name] = recorder.info(buffer).ref
    if use is not None:
        recorder.trace.used = _used_outputs(recorder, output, batch, use)  # type: ignore[attr-defined]
    return recorder.trace


def _output_leaf(recorder: Recorder, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return recorder.info(leaf).ref
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    return None  # an object that cannot be carried between stages (a cache, say)


class _Watch(torch.overrides.TorchFunctionMode):
    """Note which tensor objects are ever an argument of a torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the arguments and run the call."""
        self.seen.update(id(leaf) for leaf in leaves((args, kwargs or {})) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def _used_outputs(recorder: Recorder, output: Any, batch: Any, use: Any) -> frozenset[int] | None:
    """Find the values among the model's outputs that the loss touches (None: cannot tell, keep all)."""
    watch = _Watch()
    try:
        with watch:
            result = use(output, batch)
    except Exception:  # the loss has its own say later, on a real microbatch
        return None
    touched = watch.seen | {id(leaf) for leaf in leaves(result)}
    refs = [recorder.infos[id(t)].ref for t in leaves(output) if isinstance(t, Tensor) and id(t) in touched]
    return frozenset(r.index for r in refs if isinstance(r, Value))


# ---- two traces must be one graph ------------------------------------------------------------


def _align(first: Trace, again: Trace) -> tuple[Node, ...]:
    nodes = []
    for a, b in zip(first.nodes, again.nodes, strict=False):
        if _target_key(a) != _target_key(b) or a.module != b.module or len(a.outputs) != len(b.outputs):
            raise DataDependence(_common(a.module, b.module), "its calls differ from one batch to another")
        args = _align_value(a.args, b.args, a)
        kwargs = _align_value(a.kwargs, b.kwargs, a)
        nodes.append(dataclasses.replace(a, args=args, kwargs=kwargs))
    if len(first.nodes) != len(again.nodes):
        longer = max((first.nodes, again.nodes), key=len)
        raise DataDependence(longer[len(nodes)].module, "its calls differ from one batch to another")
    return tuple(nodes)


def _target_key(node: Node) -> Any:
    owner = getattr(node.target, "__self__", None)
    return (getattr(node.target, "__name__", node.target), getattr(owner, "__name__", None), node.opaque)


def _common(a: str, b: str) -> str:
    parts = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        parts.append(x)
    return ".".join(parts)


def _align_value(a: Any, b: Any, node: Node) -> Any:
    small, large = TRACE_SIZES
    if isinstance(a, REFS) or isinstance(b, REFS):
        if a != b:
            raise DataDependence(node.module, "it uses other tensors from one batch to another")
        return a
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {k: _align_value(a[k], b[k], node) for k in a}
    if isinstance(a, slice) and isinstance(b, slice):
        parts = zip((a.start, a.stop, a.step), (b.start, b.stop, b.step), strict=True)
        return slice(*(_align_value(x, y, node) for x, y in parts))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        parts_list = [_align_value(x, y, node) for x, y in zip(a, b, strict=True)]
        return parts_list if isinstance(a, list) else tuple(parts_list)
    if type(a) is int and type(b) is int and a != b:
        scale, rest = divmod(b - a, large - small)
        if rest == 0:
            return Affine(scale, a - scale * small)
    if _same_constant(a, b):
        return a
    raise DataDependence(node.module, f"a value in it depends on the batch ({a!r:.60} or {b!r:.60})")


def _same_constant(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if callable(a) or isinstance(a, (torch.Generator,)):
        return True  # a function made anew by each forward
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:
        return False


def _check_output(first: Trace, again: Trace) -> Any:
    a, b = leaves(first.output), leaves(again.output)
    if len(a) != len(b) or any(isinstance(x, REFS) != isinstance(y, REFS) for x, y in zip(a, b, strict=True)):
        raise DataDependence("", "the model's output has another structure from one batch to another")
    return first.output


# ---- leave the model as it was ----------------------------------------------------------------


def _python_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {path: dict(vars(module)) for path, module in model.named_modules()}


def _check_python_state(model: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    """Refuse to look into a module that counts its calls in plain Python numbers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            old = before.get(path, {}).get(name, value)
            if type(value) in (int, float, bool, str) and type(old) is type(value) and old != value:
                raise DataDependence(path, f"its forward changes its own attribute {name!r}")


@contextlib.contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, attributes and random states back after the forwards of a capture."""
    import random

    import numpy

    attributes = {module: dict(vars(module)) for module in model.modules()}
    registered = {module: dict(module._buffers) for module in model.modules()}
    tensors = {id(t): (t, t.detach().clone()) for m in model.modules() for t in _held_tensors(m)}
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        for module, values in attributes.items():
            module.__dict__.clear()
            module.__dict__.update(values)
            module._buffers.clear()
            module._buffers.update(registered[module])
        with torch.no_grad():
            for tensor, old in tensors.values():
                tensor.copy_(old)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def _held_tensors(module: nn.Module) -> list[Tensor]:
    held = [b for b in module._buffers.values() if b is not None]
    held += [v for v in vars(module).values() if isinstance(v, Tensor) and v.is_leaf]
    return [t for t in held if t.device.type != "meta"]


@contextlib.contextmanager
def _as_in_export() -> Iterator[None]:
    """Tell libraries that ask that a graph is being captured, so that they leave data-dependent checks out."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


# ---- a model that cannot be looked into -----------------------------------------------------------


def blocked_graph(model: nn.Module, forward: Forward, batch: Any, stop: DataDependence) -> Graph:
    """Make the graph of one node that runs the whole forward as the user wrote it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            stop.why += f'; "{name}" is a BatchNorm inside it'
    count = len(leaves(batch))

    def run(*batch_leaves: Any) -> Any:
        return forward(model, replace_leaves(batch, list(batch_leaves)))

    run.__name__ = "forward"
    size = len([x for x in leaves(batch) if isinstance(x, Tensor)])
    assert size >= 0
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
