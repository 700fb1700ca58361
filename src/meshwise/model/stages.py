"""A model cut into stages: for one structure of the batch, the compiled segments of each stage.

All ranks capture the same graph from the same model and choose the same cuts; each compiles every stage's
segments (cheap) and runs its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CaptureError
from .codegen import Segment, Site, compile_piece, stage_pieces
from .graph import Buffer, Constant, Graph, Input, Value
from .place import Placement, repeat_cuts
from .units import Liveness, Unit, analyse, choose_cuts, find_units


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Hold a graph, its units and the compiled segments of every stage."""

    graph: Graph
    units: tuple[Unit, ...]
    cuts: tuple[int, ...]  # first unit of each stage after the first
    stages: tuple[tuple[Segment, ...], ...]
    coupled: bool
    static: bool  # shapes and which parameters get gradients do not depend on data
    data_buffers: frozenset[str]  # buffers whose new value depends on the batch or on random numbers
    keeps_buffers: bool  # no forward of this graph changes a buffer
    draws: bool  # a forward of this graph draws (or may draw) random numbers

    def stage_of_unit(self, unit: int) -> int:
        """Give the stage that holds a unit."""
        return sum(unit >= cut for cut in self.cuts)

    def stage_params(self, stage: int) -> tuple[str, ...]:
        """List the parameters a stage uses."""
        return tuple(
            dict.fromkeys(p for u in self.units if self.stage_of_unit(u.index) == stage for p in u.params)
        )

    def sites(self, stage: int) -> tuple[Site, ...]:
        """List the sites of a stage, in the order of its segments."""
        return tuple(dict.fromkeys(s for segment in self.stages[stage] for s in segment.sites if s[0]))


def build_stages(
    graph: Graph,
    num_stages: int,
    *,
    named: Sequence[str] = (),
    chosen: Sequence[int] | None = None,
    placed: Placement | None = None,
    coupled: bool,
    statistics: str = "batch",
) -> Staged:
    """Cut a graph into stages and compile them.

    ``chosen`` are the first units of the stages after the first, from a plan (unless ``named`` says where to cut).
    ``placed`` repeats the cuts of an earlier capture (the same model in eval mode, or another batch shape).
    Raises CaptureError when the model cannot be cut so.
    """
    liveness = analyse(graph)
    units = find_units(graph, liveness)
    if num_stages == 1:
        cuts: tuple[int, ...] = ()
    elif placed is None or placed.keys is None:
        cuts = choose_cuts(graph, units, num_stages, named, chosen)
    else:
        cuts = repeat_cuts(graph, units, placed)
    has_rows = coupled and any(n.row is not None for n in graph.nodes)
    _check_rows(graph, liveness, has_rows)
    edges = [0, *(units[c].start for c in cuts), len(graph.nodes)]
    stages = tuple(
        tuple(
            compile_piece(graph, liveness, units, piece, statistics=statistics)
            for piece in stage_pieces(graph, start, stop, coupled=has_rows)
        )
        for start, stop in itertools.pairwise(edges)
    )
    return Staged(
        graph=graph,
        units=units,
        cuts=cuts,
        stages=stages,
        coupled=has_rows,
        static=is_static(graph),
        data_buffers=data_buffers(graph),
        keeps_buffers=not (graph.blocked or graph.opaque) and all(map(_keeps_buffers, itertools.chain(*stages))),
        draws=bool(graph.blocked) or any(node.random or node.opaque for node in graph.nodes),
    )


def _keeps_buffers(segment: Segment) -> bool:
    return not (segment.changes or segment.rebinds or segment.statistics or segment.opaque or segment.row)


def _check_rows(graph: Graph, liveness: Liveness, has_rows: bool) -> None:
    for i, node in enumerate(graph.nodes):
        if has_rows and node.row is not None and i in liveness.row_reasons:
            raise CaptureError(
                f'BatchNorm "{node.module}" stands between {liveness.row_reasons[i]}, so its statistics cannot '
                'be taken over the whole batch. Use Job(batch_norm="microbatch"), or do not change that tensor in '
                "place."
            )


def is_static(graph: Graph) -> bool:
    """Tell whether shapes and gradients are the same for every batch of one structure."""
    dynamic = any(info.dynamic for info in graph.values.values())
    return not graph.blocked and not any(n.opaque for n in graph.nodes) and not dynamic


def data_buffers(graph: Graph) -> frozenset[str]:
    """Find the buffers whose new value depends on the batch, on random numbers or on opaque code."""
    tainted: set[object] = set()
    for node in graph.nodes:
        refs = list(node.refs())
        hot = node.random or bool(node.opaque) or any(isinstance(r, Input) or r in tainted for r in refs)
        if not hot:
            continue
        tainted.update(Value(index) for _, index in node.outputs)
        tainted.update(r for r in node.mutates if isinstance(r, (Value, Buffer, Constant)))
        if node.opaque:
            tainted.update(Buffer(b) for b in graph.module_buffers.get(node.opaque, ()))
    tainted.update(Buffer(name) for name, ref in graph.rebinds.items() if ref in tainted)
    return frozenset(r.name for r in tainted if isinstance(r, Buffer))
