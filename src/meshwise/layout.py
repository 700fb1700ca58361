"""The layout: how a job is spread over devices, as text and as a value.

``dp=2,pp=2,schedule=1f1b`` means two replicas of a pipeline of two stages. A layout changes how fast a
step is and how much memory it takes, never what the step computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import LayoutError
from .mesh import Mesh

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
REDUCTIONS = ("exact", "fast")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """State the axes and how they are used; checked when made.

    ``dp`` replicas times ``pp`` pipeline stages (ranks) = devices. ``virtual`` stages a rank (interleaved).
    ``recompute`` runs each stage's forward again in the backward instead of keeping activations.
    ``reduction`` "exact" adds gradients in the fixed order of the tree, "fast" in the backend's own order.
    ``tp`` ranks share each layer, ``sequence`` parts what they hold alike by sequence, ``zero`` parts optimizer state
    (1), gradients (2) and parameters (3) among replicas: these three can be planned, but not run yet.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    sequence: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: bool = False
    reduction: str = "exact"

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "virtual"):
            if getattr(self, axis) < 1:
                raise LayoutError(f"{axis}={getattr(self, axis)}; it must be at least 1.")
        if self.zero not in range(4):
            raise LayoutError(f"zero={self.zero}; it is 0 (nothing parted), 1, 2 or 3.")
        if self.sequence and self.tp == 1:
            raise LayoutError("sequence=true parts activations among tp ranks; it needs tp=2 or more.")
        if self.schedule not in SCHEDULES:
            raise LayoutError(f"schedule={self.schedule!r}; use one of {', '.join(SCHEDULES)}.")
        if self.reduction not in REDUCTIONS:
            raise LayoutError(f"reduction={self.reduction!r}; use exact or fast.")
        if self.schedule == "interleaved" and self.virtual < 2:
            object.__setattr__(self, "virtual", 2)
        if self.virtual > 1 and self.schedule in ("1f1b", "zero-bubble"):
            raise LayoutError(
                f"virtual={self.virtual} with schedule={self.schedule}: several stages a rank need "
                "schedule=interleaved (or gpipe)."
            )

    @property
    def num_devices(self) -> int:
        """Count the devices the layout uses."""
        return self.dp * self.pp * self.tp

    def check_runnable(self) -> None:
        """Raise LayoutError where the layout can be planned, but not run yet."""
        if self.tp > 1 or self.zero:
            what = f"tp={self.tp}" if self.tp > 1 else f"zero={self.zero}"
            raise LayoutError(
                f"{what} is not offered yet; use dp and pp (their product is the number of devices). "
                "`meshwise plan` can say what it would give."
            )

    @property
    def num_stages(self) -> int:
        """Count the pipeline stages, virtual ones included."""
        return self.pp * self.virtual

    @property
    def mesh(self) -> Mesh:
        """Give the mesh of the layout's axes."""
        return Mesh(dp=self.dp, pp=self.pp)

    def __str__(self) -> str:
        parts = [f"{a}={getattr(self, a)}" for a in ("dp", "pp", "tp") if getattr(self, a) > 1] or ["dp=1"]
        if self.pp > 1 or self.virtual > 1:
            parts.append(f"schedule={self.schedule}")
        parts += [f"virtual={self.virtual}"] if self.virtual > 1 else []
        parts += [f"zero={self.zero}"] if self.zero else []
        parts += ["sequence=true"] if self.sequence else []
        parts += ["recompute=true"] if self.recompute else []
        parts += ["reduction=fast"] if self.reduction == "fast" else []
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str | Layout, *, devices: int | None = None) -> Layout:
        """Read a layout like ``"dp=2,pp=2"``; ``"auto"`` takes all ``devices`` as replicas.

        Raises LayoutError for an unknown key, a bad value, or a product other than ``devices``.
        """
        if isinstance(text, Layout):
            layout = text
        elif is_auto(text):
            layout = cls(dp=devices or 1)
        else:
            layout = cls(**_parse_items(text))
        if devices is not None and layout.num_devices != devices:
            raise LayoutError(
                f"layout {layout} uses {layout.num_devices} devices (dp x pp x tp), but devices={devices}. "
                "Change one of them, or leave devices out."
            )
        return layout


def is_auto(layout: str | Layout) -> bool:
    """Tell whether a layout is left open."""
    return isinstance(layout, str) and layout.strip() == "auto"


def _parse_items(text: str) -> dict[str, Any]:
    kinds = {f.name: f.type for f in fields(Layout)}
    items: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in kinds:
            raise LayoutError(f"layout {text!r}: unknown key {key!r}; known are {', '.join(kinds)}.")
        items[key] = _parse_value(key, value.strip(), str(kinds[key]))
    return items


def _parse_value(key: str, value: str, kind: str) -> object:
    if kind == "int":
        if not value.lstrip("-").isdigit():
            raise LayoutError(f"{key}={value!r}; it must be a whole number.")
        return int(value)
    if kind == "bool":
        if value.lower() not in ("true", "false", "1", "0", "yes", "no", ""):
            raise LayoutError(f"{key}={value!r}; use true or false.")
        return value.lower() in ("true", "1", "yes", "")
    return value
