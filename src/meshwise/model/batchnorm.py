"""Read what a BatchNorm call couples: its input, weight, bias and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .graph import BatchNormRow, Buffer, Param

if TYPE_CHECKING:
    from .recorder import Recorder

FUNCTIONAL = "input running_mean running_var weight bias training momentum eps".split()
OPERATOR = "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()


def read_row(recorder: Recorder, args: Any, kwargs: Any) -> BatchNormRow | None:
    """Give the row of a training BatchNorm call (functional or operator), or None in eval mode.

    Refuses, through the recorder, a weight or statistics that are no parameter or buffer.
    """
    names = OPERATOR if len(args) + len(kwargs) == len(OPERATOR) else FUNCTIONAL
    bound = dict(zip(names, args, strict=False)) | kwargs
    if not bound.get("training", False):
        return None
    refs = {
        k: recorder.info(bound[k]).ref if isinstance(bound.get(k), Tensor) else None
        for k in ("input", "running_mean", "running_var", "weight", "bias")
    }
    kinds = {"weight": Param, "bias": Param, "running_mean": Buffer, "running_var": Buffer}
    if not all(refs[k] is None or isinstance(refs[k], kind) for k, kind in kinds.items()):
        recorder.refuse("its batch norm takes a weight or statistics that are no parameter or buffer")
    x = bound["input"]
    return BatchNormRow(
        momentum=bound.get("momentum", 0.1),
        eps=bound.get("eps", 1e-5),
        channels=x.shape[1],
        dtype=x.dtype,
        **refs,  # type: ignore[arg-type]
    )
