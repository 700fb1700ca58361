"""Record one forward of a module: every torch call, with the module it happened in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..tree import leaves, leaves_with_paths, map_leaves
from .graph import Attribute, BatchNormRow, Buffer, Constant, Input, Node, Param, Ref, Value, ValueInfo

METADATA = frozenset(
    "size dim numel nelement is_floating_point is_complex is_contiguous stride storage_offset element_size"
    " get_device ndimension type is_same_size __len__ __repr__ __format__ __hash__ is_pinned is_shared"
    " is_signed is_conj is_neg is_inference has_names untyped_storage data_ptr _is_view is_nested"
    " result_type can_cast promote_types broadcast_shapes is_set_to __reduce_ex__ __deepcopy__ is_tensor"
    " _has_compatible_shallow_copy_type is_grad_enabled is_autocast_enabled".split()
)
SHAPE_READS = frozenset("size numel nelement __len__ shape".split())
DATA_SHAPES = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive _unique2 repeat_interleave".split()
)
SIDE_EFFECTS = frozenset("register_hook requires_grad_ retain_grad".split())
SENSITIVE_LAYOUTS = (torch.strided,)
_PATCH_LOCK = threading.RLock()


class DataDependence(Exception):
    """Stop a trace: Python looked at a value that only running the model can tell."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(why)
        self.module = module
        self.why = why


@dataclass(slots=True)
class Info:
    """Hold what the recorder knows of one live tensor object."""

    ref: Ref
    tainted: bool  # depends on the batch, on parameters or on random numbers
    dynamic: bool = False  # its shape depends on data


@dataclass
class Trace:
    """Hold the raw result of recording one forward."""

    nodes: list[Node] = field(default_factory=list)
    values: dict[int, ValueInfo] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)
    output: Any = None
    output_objects: Any = None
    rebinds: dict[str, Ref] = field(default_factory=dict)


class Recorder(TorchFunctionMode):
    """Record the torch calls of one forward, seen from above autograd and autocast.

    ``opaque`` names modules that are run as a whole, each with the reason. ``extreme`` is what a 0-dim
    ``torch.rand`` returns: two traces with 0 and almost 1 show whether a branch on it can go two ways.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_leaves: list[Any],
        *,
        opaque: dict[str, str],
        extreme: float,
        num_samples: int,
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.opaque = opaque
        self.extreme = extreme
        self.num_samples = num_samples
        self.recording = True
        self.keep: list[Any] = []
        self.infos: dict[int, Info] = {}
        self.stack: list[tuple[str, int]] = [("", 0)]
        self.num_calls = 0
        self.paths: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=True):
            self.paths[id(module)] = path
        self._learn_state(model, batch_leaves)

    def _learn_state(self, model: nn.Module, batch_leaves: list[Any]) -> None:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._learn(value, Attribute(path, name), tainted=False)
        for name, buffer in model.named_buffers():
            self._learn(buffer, Buffer(name), tainted=False)
        for name, parameter in model.named_parameters():
            self._learn(parameter, Param(name), tainted=True)
        for index, leaf in enumerate(batch_leaves):
            if isinstance(leaf, Tensor):
                self._learn(leaf, Input(index), tainted=True)

    def _learn(self, tensor: Tensor, ref: Ref, *, tainted: bool, dynamic: bool = False) -> None:
        self.keep.append(tensor)
        self.infos[id(tensor)] = Info(ref, tainted, dynamic)

    @property
    def module(self) -> str:
        """Name the innermost module that is running."""
        return self.stack[-1][0]

    def refuse(self, why: str) -> None:
        """Stop the trace because of something in the innermost module."""
        raise DataDependence(self.module, why)

    def info(self, tensor: Tensor) -> Info:
        """Look a tensor up; one never seen before becomes a constant of the graph."""
        found = self.infos.get(id(tensor))
        if found is not None:
            return found
        if tensor.grad_fn is not None:
            self.refuse("a tensor with a gradient history came from a call that torch does not show")
        self.trace.constants.append(tensor)
        self._learn(tensor, Constant(len(self.trace.constants) - 1), tainted=False)
        return self.infos[id(tensor)]

    def template(self, value: Any) -> Any:
        """Replace the tensors inside nested arguments by references."""
        return map_leaves(lambda leaf: self.info(leaf).ref if isinstance(leaf, Tensor) else leaf, value)

    # ---- torch calls -------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one torch call and record it."""
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return self._read_property(func, args, kwargs)
        if name in METADATA:
            self._check_shape_read(name, args)
            return func(*args, **kwargs)
        if name == "backward":
            self.refuse("it calls backward() inside its forward")
        return self._run(func, name, args, kwargs)

    def _read_property(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if isinstance(result, Tensor) and owner not in ("grad", "_base"):
            return self._run(func, owner, args, kwargs)
        self._check_shape_read(owner, args)
        return result

    def _check_shape_read(self, name: str, args: tuple[Any, ...]) -> None:
        if name in SHAPE_READS and args and isinstance(args[0], Tensor):
            found = self.infos.get(id(args[0]))
            if found is not None and found.dynamic:
                self.refuse("Python reads the size of a tensor whose size depends on the data")

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "rand" and not leaves(args) and kwargs.get("out") is None:
            return self._scalar_rand(func, args, kwargs)
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self.info(tensor)
        if name == "batch_norm":
            return self._batch_norm(func, args, kwargs, inputs)
        return self.call(func, name, args, kwargs, inputs)

    def _scalar_rand(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs).fill_(self.extreme)
        return self._store(func, args, kwargs, result, [], random=True, tainted=False)

    def _batch_norm(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        row = self._read_row(args, kwargs)
        return self.call(func, "batch_norm", args, kwargs, inputs, row=row)

    def _read_row(self, args: Any, kwargs: Any) -> BatchNormRow | None:
        names = "input running_mean running_var weight bias training momentum eps cudnn_enabled".split()
        if getattr(args[0], "ndim", 0) and len(args) + len(kwargs) == 9:  # torch.batch_norm has another order
            names = "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()
        bound = dict(zip(names, args, strict=False)) | kwargs
        if not bound.get("training", False):
            return None
        refs = {
            k: self.info(bound[k]).ref if isinstance(bound.get(k), Tensor) else None
            for k in ("input", "running_mean", "running_var", "weight", "bias")
        }
        plain = all(
            refs[k] is None or isinstance(refs[k], kind)
            for k, kind in (
                ("weight", Param),
                ("bias", Param),
                ("running_mean", Buffer),
                ("running_var", Buffer),
            )
        )
        if not plain:
            self.refuse("its batch norm takes a weight or statistics that are no parameter or buffer")
        momentum, eps = bound.get("momentum", 0.1), bound.get("eps", 1e-5)
        shape, dtype = args[0].shape, args[0].dtype
        return BatchNormRow(momentum=momentum, eps=eps, channels=shape[1], dtype=dtype, **refs)  # type: ignore[arg-type]

    def call(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        row: BatchNormRow | None = None,
    ) -> Any:
        """Run a call on real tensors and store it as a node when it makes or changes a tensor."""
        versions = [t._version for t in inputs]
        rng = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        random = not torch.equal(rng, torch.default_generator.get_state())
        mutated = [t for t, v in zip(inputs, versions, strict=True) if t._version != v]
        tainted = random or any(self.infos[id(t)].tainted for t in inputs)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if not made and not mutated and not random and name not in SIDE_EFFECTS:
            if tainted and result is not None:
                self.refuse(f"Python reads the data of a tensor ({name})")
            return result
        if made and not tainted and not all(isinstance(leaf, Tensor) for leaf in leaves(result)):
            tainted = tainted or bool(inputs)
        dynamic = self._dynamic(name, args, kwargs, inputs)
        return self._store(
            func, args, kwargs, result, mutated, random=random, tainted=tainted, dynamic=dynamic, row=row
        )

    def _dynamic(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> bool:
        if name in DATA_SHAPES or (name == "where" and len(args) + len(kwargs) == 1):
            return True
        if name == "__getitem__":
            index = [leaf for leaf in leaves(args[1:]) if isinstance(leaf, Tensor)]
            if any(t.dtype in (torch.bool, torch.uint8) for t in index):
                return True
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
        mutates = tuple(self.info(t).ref for t in mutated)
        for tensor in mutated:
            self.infos[id(tensor)].tainted |= tainted
        outputs = self._name_outputs(result, tainted, dynamic)
        module, call = self.stack[-1]
        self.trace.nodes.append(
            Node(
                target=func,
                args=template[0],
                kwargs=template[1],
                outputs=outputs,
                module=module,
                call=call,
                grad=torch.is_grad_enabled(),
                mutates=mutates,
                random=random,
                opaque=opaque,
                row=row,
                cost=self._cost(func, args, result),
            )
        )
        return result

    def _cost(self, func: Any, args: Any, result: Any) -> float:
        from .cost import estimate_call_seconds

        return estimate_call_seconds(func, args, result) / self.num_samples

    def _name_outputs(self, result: Any, tainted: bool, dynamic: bool) -> tuple[tuple[Any, int], ...]:
        outputs = []
        for path, leaf in leaves_with_paths(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.infos:
                index = len(self.trace.values)
                self.trace.values[index] = describe(leaf, len(self.trace.nodes), self.num_samples)
                self._learn(leaf, Value(index), tainted=tainted, dynamic=dynamic)
                outputs.append((path, index))
        return tuple(outputs)

    # ---- module calls ------------------------------------------------------------------------

    def module_call(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        """Follow the user into a module, or run it as a whole when it is opaque."""
        path = self.paths.get(id(module))
        if path is None or not self.recording:
            return original(module, *args, **kwargs)
        self.num_calls += 1
        why = self.opaque.get(path) or hooked(module)
        if why and path != "":
            self.opaque.setdefault(path, why)
        self.stack.append((path, self.num_calls))
        try:
            if path in self.opaque and path != "":
                return self._opaque_call(path, module, original, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self.stack.pop()

    def _opaque_call(self, path: str, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        watched = [*inputs, *module.buffers()]
        versions = [t._version for t in watched]
        for tensor in watched:
            self.info(tensor)
        self.recording = False
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.recording = True
        mutated = [t for t, v in zip(watched, versions, strict=True) if t._version != v]
        self._check_no_batch_norm(path, module)
        return self._store(
            module, args, kwargs, result, mutated, random=True, tainted=True, dynamic=False, opaque=path
        )

    def _check_no_batch_norm(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
                inner = f"{path}.{name}" if name else path
                raise DataDependence(
                    "", f'BatchNorm "{inner}" is inside "{path}", which cannot be looked into'
                )


def hooked(module: nn.Module) -> str:
    """Say which hooks of the user's make a module one that must run as it is, or return ''."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [kind.strip("_").replace("_", " ") for kind in kinds if getattr(module, kind, None)]
    return f"it has {found[0]}" if found else ""


def describe(tensor: Tensor, producer: int, num_samples: int) -> ValueInfo:
    """State what a traced tensor looked like."""
    strided = tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter)
    storage = tensor.untyped_storage()._cdata if strided else -1
    return ValueInfo(
        producer=producer,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        storage=storage,
        sendable=strided and not overlaps(tensor),
        bytes_per_sample=tensor.numel() * tensor.element_size() / num_samples,
    )


def overlaps(tensor: Tensor) -> bool:
    """Tell whether different elements share memory, expanded (stride 0) dims aside."""
    dims = sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if st != 0 and sz > 1
    )
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@contextlib.contextmanager
def patched_calls(recorder: Recorder) -> Iterator[None]:
    """Route module calls and custom autograd functions through ``recorder`` for a while."""
    original_call = nn.Module.__call__
    original_apply = torch.autograd.Function.__dict__["apply"]

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module_call(module, original_call, args, kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original_apply.__get__(None, cls)
        if not recorder.recording:
            return run(*args, **kwargs)
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            recorder.info(tensor)
        recorder.recording = False
        try:
            return _record_function(recorder, cls, run, args, kwargs, inputs)
        finally:
            recorder.recording = True

    with _PATCH_LOCK:
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(function_apply)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]


def _record_function(recorder: Recorder, cls: Any, run: Any, args: Any, kwargs: Any, inputs: Any) -> Any:
    def apply(*a: Any, **k: Any) -> Any:
        return run(*a, **k)

    apply.__name__ = cls.__name__
    return recorder.call(apply, cls.__name__, args, kwargs, inputs)
