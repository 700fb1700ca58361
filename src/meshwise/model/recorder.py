"""Record one forward of a module: every torch call, with the module it happened in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..tree import leaves, leaves_with_paths, map_leaves
from .batchnorm import read_row
from .cost import estimate_call_seconds
from .graph import Attribute, BatchNormRow, Buffer, Constant, Input, Node, Param, Ref, Value
from .guards import Check, Fresh, check_shape
from .looks import (
    METADATA,
    SHAPE_READS,
    SIDE_EFFECTS,
    autocast_state,
    decided,
    describe,
    foreign_random_state,
    generators_of,
    reads_for_shape,
    shape_of_first,
)
from .trace import DataDependence, Info, ReadKey, Trace
from .watch import Scope, called_in_transform, in_transform, storage_of, tensors_in


class Recorder(TorchFunctionMode):
    """Record the torch calls of one forward, seen from above autograd and autocast.

    ``opaque`` names modules that are run as a whole, each with the reason; ``hooks`` those that must be for
    their hooks' sake. ``checks`` are tests on the data that are known to be mere checks; ``flip`` is a test
    to answer the other way, to see whether it is one.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_leaves: list[Any],
        *,
        opaque: dict[str, str],
        hooks: Mapping[str, str],
        num_samples: int,
        checks: Mapping[ReadKey, Exception],
        flip: ReadKey | None = None,
    ) -> None:
        super().__init__()
        self.trace = Trace(size=num_samples)
        self.opaque, self.hooks, self.checks, self.flip = opaque, hooks, checks, flip
        self.calls_since_flip = -1  # -1: not flipped
        self.reads: dict[str, int] = {}
        self.num_samples = num_samples
        self.stopped: DataDependence | None = None
        self.scope: Scope | None = None
        self.keep: list[Any] = []
        self.infos: dict[int, Info] = {}
        self.sharing: dict[int | None, list[Info]] = {}  # what shares one piece of memory
        self.storages: dict[int, int] = {}  # memory known so far -> its place in the order
        self.born: set[int] = set()
        self.stack: list[tuple[str, int]] = [("", 0)]
        self.num_calls = 0
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.generators = generators_of(model)
        self.foreign = foreign_random_state()
        self.devices = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
        self.autocast = autocast_state(self.devices)
        self._learn_state(model, batch_leaves)

    def _learn_state(self, model: nn.Module, batch_leaves: list[Any]) -> None:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._learn(value, Attribute(path, name), tainted=True)
        for name, buffer in model.named_buffers():
            self._learn(buffer, Buffer(name), tainted=True)
        for name, parameter in model.named_parameters():
            self._learn(parameter, Param(name), tainted=True)
        for index, leaf in enumerate(leaf for leaf in batch_leaves if isinstance(leaf, Tensor)):
            self._learn(leaf, Input(index), tainted=True)

    # ---- what is known of tensors --------------------------------------------------------------

    def _learn(self, tensor: Tensor, ref: Ref, *, tainted: bool, dynamic: bool = False) -> None:
        self.keep.append(tensor)
        info = self.infos[id(tensor)] = Info(ref, tainted, dynamic)
        self.sharing.setdefault(storage_of(tensor), []).append(info)
        if not isinstance(ref, Constant):
            self.note_storage(tensor)

    def note_storage(self, tensor: Tensor) -> None:
        """Remember that a tensor's memory belongs to the trace."""
        storage = storage_of(tensor)
        if storage is None:
            self.keep.append(tensor)
            self.born.add(id(tensor))
        elif storage not in self.storages:
            self.keep.append(tensor.untyped_storage())
            self.storages[storage] = len(self.storages)

    def knows(self, tensor: Tensor, storage: int | None, *, before: int) -> bool:
        """Tell whether a tensor (no constant) was there when ``before`` pieces of memory were known."""
        found = self.infos.get(id(tensor))
        if found is not None:
            return not isinstance(found.ref, Constant)
        if storage is None:
            return id(tensor) in self.born
        return self.storages.get(storage, before) < before

    def is_tainted(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's values may differ from one microbatch to another (yes where unknown)."""
        found = self.infos.get(id(tensor))
        return found is None or found.tainted

    @property
    def module(self) -> str:
        """Name the innermost module that is running."""
        return self.stack[-1][0]

    def refuse(self, why: str) -> NoReturn:
        """Stop the trace because of something in the innermost module."""
        self.stop(DataDependence(self.module, why))

    def stop(self, why: DataDependence) -> NoReturn:
        """Stop the trace, even where the forward catches everything."""
        self.stopped = self.stopped or why
        raise why

    def info(self, tensor: Tensor) -> Info:
        """Look a tensor up; one that was there before the trace becomes a constant of the graph."""
        found = self.infos.get(id(tensor))
        if found is not None:
            return found
        if tensor.grad_fn is not None or self.knows(tensor, storage_of(tensor), before=len(self.storages)):
            self.refuse("it uses a tensor that came from a call that torch does not show")
        self.trace.constants.append(tensor)
        self.trace.readers.append(self.module)
        self._learn(tensor, Constant(len(self.trace.constants) - 1), tainted=False)
        return self.infos[id(tensor)]

    def template(self, value: Any) -> Any:
        """Replace the tensors inside nested arguments by references."""
        return map_leaves(lambda leaf: self.info(leaf).ref if isinstance(leaf, Tensor) else leaf, value)

    @contextlib.contextmanager
    def inside(self, scope: Scope) -> Iterator[None]:
        """Run one call as a whole: nothing within it is recorded."""
        scope.since = len(self.storages)
        outer, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = outer

    # ---- torch calls -------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one torch call and record it."""
        kwargs = kwargs or {}
        if self.scope is not None or in_transform():  # in a transform, its operators are recorded instead
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return self._read_property(func, args, kwargs)
        if name in METADATA and not (name == "type" and len(args) + len(kwargs) > 1):
            self._check_shape_read(name, args)
            with self.inside(Scope(allowed=None)):
                return func(*args, **kwargs)
        self.calls_since_flip += self.calls_since_flip >= 0
        if name == "backward":
            self.refuse("it calls backward() inside its forward")
        if name == "register_hook":
            self.refuse("it registers a hook on a tensor")
        return self._run(func, name, args, kwargs)

    def _read_property(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction(), self.inside(Scope(allowed=None)):
            result = func(*args, **kwargs)
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if isinstance(result, Tensor) and owner in ("grad", "_base"):
            self.refuse(f"it reads .{owner} of a tensor")
        if isinstance(result, Tensor):
            return self._run(func, owner, args, kwargs)
        self._check_shape_read(owner, args)
        return result

    def _check_shape_read(self, name: str, args: tuple[Any, ...]) -> None:
        if name in SHAPE_READS and args and isinstance(args[0], Tensor):
            found = self.infos.get(id(args[0]))
            if found is not None and found.dynamic:
                self.refuse("Python reads the size of a tensor whose size depends on the data")

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            self.info(tensor)
        row = read_row(self, args, kwargs) if name == "batch_norm" else None
        if name == "contiguous" and isinstance(self.infos[id(args[0])].ref, (Value, Input)):
            func = Fresh(func)
        result = self.call(func, name, args, kwargs, inputs, row=row)
        if name == "rand" and not inputs and isinstance(result, Tensor) and result.numel() == 1:
            self.infos[id(result)].unit = True
        return result

    def whole_call(self, target: Any, run: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Record a custom autograd function or a script function (``target``) as one call."""
        if self.scope is not None:
            return run(*args, **kwargs)
        if in_transform():
            self.refuse(f"it calls {name} inside a torch.func transform")
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            self.info(tensor)
        return self.call(target, name, args, kwargs, inputs, keep=True)

    def loose_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that no call seen from Python holds: record it in a transform, else refuse it."""
        inputs = tensors_in((args, kwargs))
        if called_in_transform():
            if func._schema.is_mutable:
                self.refuse("it changes a tensor in place inside a torch.func transform")
            for tensor in inputs:
                self.info(tensor)
            return self.call(func, func.__name__, args, kwargs, inputs)
        seen = any(self.knows(t, storage_of(t), before=len(self.storages)) for t in inputs)
        if seen or torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(f"it makes a call that torch does not show ({func.__name__})")
        return func(*args, **kwargs)

    def call(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        *,
        row: BatchNormRow | None = None,
        keep: bool = False,
    ) -> Any:
        """Run a call on real tensors and store it as a node when it makes or changes a tensor."""
        versions = [t._version for t in inputs]
        states = self._random_states()
        scope = Scope(allowed=inputs, keep=keep)
        with self.inside(scope):
            result = func(*args, **kwargs)
        if keep:
            result = self._as_new(result)
        if scope.hidden:
            self.refuse(f"{name} uses a tensor that is not among its arguments")
        random = self._random_states() != states
        mutated = [t for t, v in zip(inputs, versions, strict=True) if t._version != v]
        tainted = random or any(self.infos[id(t)].tainted for t in inputs)
        if isinstance(func, torch.jit.ScriptFunction) and not random and not scope.touched:
            tainted = not self._only_sizes(inputs)
        if tainted and len(inputs) == 1 and self.infos[id(inputs[0])].unit and decided(name, args):
            tainted = False
        made = tensors_in(result)
        if not made and not mutated and not random and name not in SIDE_EFFECTS:
            return self._read_data(func, name, args, kwargs, result) if tainted else result
        if tainted and any(isinstance(leaf, (int, float, str)) for leaf in leaves(result)):
            self.refuse(f"Python reads the data of a tensor ({name})")
        dynamic = tainted and self._dynamic(name, args, kwargs, inputs, scope.data_shaped)
        return self._store(
            func, args, kwargs, result, mutated, random=random, tainted=tainted, dynamic=dynamic, row=row
        )

    def _random_states(self) -> list[bytes]:
        with torch._C.DisableTorchFunction():
            return [generator.get_state().numpy().tobytes() for generator in self.generators]

    def _as_new(self, result: Any) -> Any:
        """Tell what user code returned from what it was given, even where that is one object this time."""
        if not any(id(t) in self.infos for t in tensors_in(result)):
            return result
        with torch._C.DisableTorchFunction(), self.inside(Scope(allowed=None)):
            return map_leaves(
                lambda t: t.view_as(t) if isinstance(t, Tensor) and id(t) in self.infos else t, result
            )

    def _only_sizes(self, inputs: list[Tensor]) -> bool:
        """Tell whether a script function that ran no operator on its inputs saw but sizes (no fused code)."""
        return not any(self.infos[id(t)].dynamic or t.device.type != "cpu" for t in inputs)

    def _read_data(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Let Python see a test on the data only where its other outcome is known to raise."""
        if result is None:
            return None
        why = f"Python reads the data of a tensor ({name})"
        if type(result) is not bool:
            self.refuse(why)
        count = self.reads[self.module] = self.reads.get(self.module, -1) + 1
        key = (self.module, count)
        if key in self.checks:
            check = Check(func, result, self.checks[key])
            self._store(check, args, kwargs, None, [], random=False, tainted=True)
            return result
        if key == self.flip:
            self.calls_since_flip = 0
            return not result
        self.stop(DataDependence(self.module, why, key))

    def _dynamic(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], data_shaped: bool) -> bool:
        if data_shaped and reads_for_shape(name, args, kwargs):
            return True
        if inputs and shape_of_first(name):
            return self.infos[id(inputs[0])].dynamic
        return any(self.infos[id(t)].dynamic for t in inputs)

    def _store(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        mutated: list[Tensor],
        *,
        random: bool,
        tainted: bool,
        dynamic: bool = False,
        row: BatchNormRow | None = None,
        opaque: str = "",
    ) -> Any:
        template = self.template((tuple(args), dict(kwargs)))
        mutates = self._changed(mutated, tainted)
        if any(isinstance(ref, (Constant, Attribute)) for ref in mutates) and not opaque:
            self.refuse("it changes a tensor in place that is neither made in the forward nor a buffer")
        outputs = self._name_outputs(result, tainted, dynamic)
        module, call = self.stack[-1]
        state = autocast_state(self.devices)
        self.trace.nodes.append(
            Node(
                target=func,
                args=template[0],
                kwargs=template[1],
                outputs=outputs,
                module=module,
                call=call,
                grad=torch.is_grad_enabled(),
                autocast=tuple(s for s, ambient in zip(state, self.autocast, strict=True) if s != ambient),
                mutates=mutates,
                random=random,
                opaque=opaque,
                row=row,
                cost=self._seconds(func, args, result),
            )
        )
        return result

    def _seconds(self, func: Any, args: Any, result: Any) -> float:
        with torch._C.DisableTorchFunction():
            return estimate_call_seconds(func, args, result) / self.num_samples

    def _changed(self, mutated: list[Tensor], tainted: bool) -> tuple[Ref, ...]:
        """List what a call changes: its arguments, and state or inputs that share their memory."""
        refs = [self.info(t).ref for t in mutated]
        for tensor in mutated:
            storage = storage_of(tensor)
            for info in [self.infos[id(tensor)], *(self.sharing[storage] if storage is not None else ())]:
                info.tainted |= tainted
                info.unit = False
                if not isinstance(info.ref, Value):
                    refs.append(info.ref)
        return tuple(dict.fromkeys(refs))

    def _name_outputs(self, result: Any, tainted: bool, dynamic: bool) -> tuple[tuple[Any, int], ...]:
        outputs = []
        for path, leaf in leaves_with_paths(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.infos:
                index = len(self.trace.values)
                varies = dynamic and leaf.ndim > 0
                info = describe(leaf, len(self.trace.nodes), self.num_samples, dynamic=varies)
                self.trace.values[index] = info
                self._learn(leaf, Value(index), tainted=tainted, dynamic=varies)
                outputs.append((path, index))
        return tuple(outputs)

    # ---- module calls ------------------------------------------------------------------------

    def module_call(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        """Follow the user into a module, or run it as a whole when it is opaque."""
        path = self.paths.get(id(module))
        if path is None or self.scope is not None:
            return original(module, *args, **kwargs)
        self.check_foreign_random()
        self.num_calls += 1
        why = self.opaque.get(path) or self.hooks.get(path)
        if why and path != "":
            self.opaque.setdefault(path, why)
        self.stack.append((path, self.num_calls))
        try:
            if path in self.opaque and path != "":
                return self._opaque_call(path, module, original, args, kwargs)
            result = original(module, *args, **kwargs)
            self.check_foreign_random()
            return result
        finally:
            self.stack.pop()

    def check_foreign_random(self) -> None:
        """Refuse Python's and numpy's random numbers, which a graph cannot draw anew."""
        now = foreign_random_state()
        if now != self.foreign:
            self.foreign = now
            self.refuse("it draws random numbers from Python's or numpy's generator")

    def _opaque_call(self, path: str, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs))
        self._check_opaque(path, module)
        watched = [*inputs, *module.buffers()]
        versions = [t._version for t in watched]
        for tensor in watched:
            self.info(tensor)
        inner = [*module.parameters(), *module.buffers()]
        inner += [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
        scope = Scope(allowed=[*inputs, *inner], keep=True)
        with self.inside(scope):
            result = original(module, *args, **kwargs)
        result = self._as_new(result)
        self.foreign = foreign_random_state()
        if scope.hidden:
            self._refuse_around(path, "uses tensors that are neither its arguments nor its own")
        self._check_plain_results(path, (args, kwargs), result)
        mutated = [t for t, v in zip(watched, versions, strict=True) if t._version != v]
        self._store(module, args, kwargs, result, mutated, random=True, tainted=True, opaque=path)
        if scope.data_shaped:
            self._pin_shapes(path, result)
        return result

    def _refuse_around(self, path: str, what: str) -> None:
        around = path.rpartition(".")[0]
        self.stop(DataDependence(around, f'"{path}", which runs as a whole ({self.opaque[path]}), {what}'))

    def _check_opaque(self, path: str, module: nn.Module) -> None:
        if in_transform():
            self._refuse_around(path, "is called inside a torch.func transform")
        for name, child in module.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
                inner = f"{path}.{name}" if name else path
                why = f'BatchNorm "{inner}" is inside "{path}", which cannot be looked into'
                self.stop(DataDependence("", f"{why} ({self.opaque[path]})"))

    def _check_plain_results(self, path: str, given: Any, result: Any) -> None:
        known = {id(leaf) for leaf in leaves(given)}
        for leaf in leaves(result):
            if leaf is None or isinstance(leaf, Tensor):
                continue
            if isinstance(leaf, (bool, int, float, complex, str)) or id(leaf) not in known:
                self._refuse_around(path, f"returns a {type(leaf).__name__}, which may depend on the data")

    def _pin_shapes(self, path: str, result: Any) -> None:
        """Have each microbatch check that an opaque module's results are shaped as the code around it saw."""
        for tensor in tensors_in(result):
            args = (tensor, tuple(tensor.shape), path)
            self._store(check_shape, args, {}, None, [], random=False, tainted=False)
