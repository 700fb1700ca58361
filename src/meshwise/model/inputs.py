"""A microbatch as the inputs of a graph: its tensors in a fixed order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tree import leaves


class Inputs(list[Tensor]):
    """List the tensors of a microbatch; ``data`` is the microbatch itself, for a model that runs as a whole."""

    def __init__(self, data: Any) -> None:
        flat = data if type(data) in (tuple, list) and all(type(leaf) is Tensor for leaf in data) else leaves(data)
        super().__init__(leaf for leaf in flat if isinstance(leaf, Tensor))
        self.data = data
