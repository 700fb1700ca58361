"""What a capture fixes of a model's Python side, looked at anew in each step and therefore fast."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Set
from operator import itemgetter
from typing import Any

from torch import nn

PLAIN = frozenset((bool, int, float, str, type(None)))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks_of = itemgetter(*HOOKS)


class Settings:
    """Watch the flags, rates, modes and hooks of a model's modules.

    Left out are the modules that run as the user wrote them (``opaque``).
    """

    def __init__(self, model: nn.Module, opaque: Set[str]) -> None:
        self.model, self.opaque = model, opaque
        self.plans: list[_Plan] = []
        self.last: list[Any] = []
        self.hashed: Hashable = None

    def look(self) -> Hashable:
        """Describe the settings as they are now: equal descriptions, equal captures."""
        if not self.plans or not all(plan.holds() for plan in self.plans):
            self.plans = [_Plan(module) for module in self._modules()]
            self.last = []
        found = [plan.read() for plan in self.plans]
        if found != self.last:
            self.last, self.hashed = found, hash(tuple(found))
        return self.hashed

    def _modules(self) -> Iterator[nn.Module]:
        for path, module in self.model.named_modules():
            if not any(o in ("", path) or path.startswith(f"{o}.") for o in self.opaque):
                yield module


class _Plan:
    """Remember which attributes of a module are plain values, as long as each keeps its kind."""

    def __init__(self, module: nn.Module) -> None:
        self.values = vars(module)
        self.kinds = tuple(map(type, self.values.values()))
        self.children = tuple(self.values["_modules"].values())
        plain = [key for key, kind in zip(self.values, self.kinds, strict=True) if kind in PLAIN]
        self.plain: Callable[[Any], Any] = itemgetter(*plain) if plain else lambda values: ()

    def holds(self) -> bool:
        """Tell whether the module has the same attributes, of the same kinds, and the same children."""
        values = self.values
        return (
            tuple(map(type, values.values())) == self.kinds and tuple(values["_modules"].values()) == self.children
        )

    def read(self) -> tuple[Any, ...]:
        """Give the plain values and the hooks (by their keys)."""
        hooks = _hooks_of(self.values)
        return self.plain(self.values), tuple(map(tuple, hooks)) if any(hooks) else ()
