"""The raw result of recording one forward, and what stops a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .graph import Node, Ref, ValueInfo

ReadKey = tuple[str, int]  # module path, and how many reads in that module came before


class DataDependence(BaseException):
    """Stop a trace: Python looked at a value that only running the model can tell.

    ``read`` names a test that Python made, which the other outcome may show to be a mere check. It is no
    Exception, so that a forward does not catch it.
    """

    def __init__(self, module: str, why: str, read: ReadKey | None = None) -> None:
        super().__init__(why)
        self.module = module
        self.why = why
        self.read = read


@dataclass(slots=True)
class Info:
    """Hold what the recorder knows of one live tensor object."""

    ref: Ref
    tainted: bool  # depends on the batch, on parameters, on buffers or on random numbers
    dynamic: bool = False  # its shape depends on data
    unit: bool = False  # one number drawn from [0, 1)


@dataclass
class Trace:
    """Hold the raw result of recording one forward."""

    size: int  # samples in the batch
    nodes: list[Node] = field(default_factory=list)
    values: dict[int, ValueInfo] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)  # the module that first reads each constant
    output: Any = None
    used: frozenset[int] | None = None
    rebinds: dict[str, Ref] = field(default_factory=dict)
