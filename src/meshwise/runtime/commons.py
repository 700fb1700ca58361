"""Parameters, gradients and the update in memory that the replicas of one host share.

::

    backward           exchange                 update                  next step
    each rank writes   each rank adds up its    each rank updates its   all read the parameters
    its gradients      share of all rows        share of the row        from the one row

Nothing travels: ranks tell one another only that they are done. Where it does not apply (several hosts, user hooks on
gradients, sparse gradients, an optimizer that looks at whole parameters), gradients are exchanged as messages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.codegen import PART_BITS, Site
from ..model.stages import Staged
from ..parallel.flats import is_dense
from ..parallel.rows import NOWHERE, RowLayout, SharedParameters, view_like
from ..parallel.segment import PrivateView, SharedMemoryError
from ..parallel.shared_reduce import Reach, SharedReducer
from ..parallel.transport import wait_for
from .elementwise import allows_pieces, bare_step, kernel_chosen, kernels_for
from .pieces import Part, Pieces, State, copied, whole_state

if TYPE_CHECKING:
    from .engine import Engine

Steps = Generator[None, None, Any]
EMBEDDING_SPARSE = 6  # place of ``sparse`` among the arguments of F.embedding

log = logging.getLogger("meshwise")


class Commons:
    """Own what a rank shares with the other replicas of its host. ``active``: it is in use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tried = self.active = False
        self.reason = ""  # why it is not in use
        self.kernel = ""
        self.reducer: SharedReducer | None = None
        self.shared: Any = None  # SharedParameters, once it is active
        self.seen: PrivateView | None = None  # the sums as the user sees them: what it does to them stays its own
        self.seen_at: Any = None  # their segment, and the byte at which they begin in it
        self.seen_version = 0
        self.views: list[Tensor] = []  # of ``seen``, one for each parameter

    # ---- beginning -------------------------------------------------------------------------------------

    def open(self) -> Steps:
        """Move parameters to shared memory before the first step, if all replicas can. Every rank calls it."""
        if self.tried:
            return
        self.tried = True
        engine = self.engine
        reach = Reach.of(engine.transport, engine.dp_group) if len(engine.dp_group) > 1 else None
        if reach is None:
            self.reason = "replicas do not share a host" if len(engine.dp_group) > 1 else "there is one replica"
            return
        self.reach = reach
        self.names = self._own_names()
        self.reason = self._obstacle()
        reasons = yield from wait_for(engine.transport.all_gather_object(self.reason, engine.dp_group))
        self.reason = next((r for r in reasons if r), "")
        if not self.reason:
            yield from self._move_in()
        if self.reason:
            log.debug("replicas exchange gradients as messages: %s", self.reason)

    def _own_names(self) -> list[str]:
        """List this rank's trainable parameters as they lie in the row: by the optimizer's groups."""
        engine = self.engine
        assert engine.optimizer is not None
        number = {id(p): g for g, group in enumerate(engine.optimizer.param_groups) for p in group["params"]}
        placed = engine.book.placed
        self.trainable = engine.trainable
        mine = [
            name
            for name, parameter in engine.parameters.items()
            if parameter.requires_grad and (engine.layout.pp == 1 or engine.pp_index in placed.ranks(name))
        ]
        self.group_of = {n: number.get(id(engine.parameters[n]), -1) for n in mine}
        return sorted(mine, key=lambda n: self.group_of[n])

    def _obstacle(self) -> str:
        """Say what stands against sharing, as far as this rank knows; nothing if nothing does."""
        engine = self.engine
        parameters = [engine.parameters[n] for n in self.names]
        assert engine.optimizer is not None
        if engine.device.type != "cpu":
            return "the device has memory of its own"
        if not parameters or not all(is_dense(p) and p.numel() for p in parameters):
            return "a parameter does not fill its memory"
        if _overlap(parameters):
            return "two parameters are in one memory"
        if engine.hooks:
            return "gradient hooks want whole gradients"
        if any(len(engine.book.placed.ranks(n)) > 1 for n in self.names):
            return "a parameter is on several stages"
        if _has_sparse(engine):
            return "gradients are sparse"
        if not allows_pieces(engine.optimizer):
            return "the optimizer is not known to treat every element by itself"
        return ""

    def _move_in(self) -> Steps:
        engine = self.engine
        assert engine.optimizer is not None
        parameters = [engine.parameters[n] for n in self.names]
        layout = RowLayout.of(parameters)
        segment = yield from wait_for(engine.transport.share(layout.num_bytes, self.reach.here))
        problem = engine.transport.note or "memory cannot be shared" if segment is None else ""
        try:
            self.shared = SharedParameters(segment, parameters, layout) if segment is not None else None
        except SharedMemoryError as error:
            problem = str(error)
        problems = yield from wait_for(engine.transport.all_gather_object(problem, engine.dp_group))
        self.reason = next((p for p in problems if p), "")
        if self.reason:
            return
        assert self.shared is not None
        me, count = self.reach.here.index(engine.transport.rank), len(self.reach.here)
        if me == 0:
            self.shared.publish()
        yield from wait_for(engine.transport.meet(self.reach.here))
        self.shared.adopt()
        self.pieces = Pieces(
            row=self.shared.row,
            layout=layout,
            parameters=parameters,
            groups=[self.group_of[n] for n in self.names],
            share=layout.share(me, count),
            optimizer=engine.optimizer,
        )
        kernels = kernels_for(engine.optimizer)
        self.kernel = next((k for k in kernels if allows_pieces(engine.optimizer, k)), "")
        self.pieces.install()
        self.active = True

    def close(self) -> Steps:
        """Go back to parameters and optimizer state of this rank's own. Every replica calls it."""
        engine = self.engine
        assert engine.optimizer is not None
        states = yield from self.gather_states()
        engine.gradients.forget_places()
        self.active, self.reducer = False, None
        self.tried = self.trainable == engine.trainable  # others may train from now on: then the next step tries again
        self.reason = "the shared memory does not hold what this step needs"
        for name in self.names:
            engine.parameters[name].data = engine.parameters[name].detach().clone()
        self.pieces.remove()
        self.shared, self.seen, self.views = None, None, []
        del self.pieces
        for name, state in states.items():
            engine.optimizer.state[engine.parameters[name]] = state

    # ---- gradients -------------------------------------------------------------------------------------

    def reducer_for(self, sites: Sequence[Site], buckets: Sequence[Sequence[int]]) -> SharedReducer | None:
        """Make the reducer of these sites; None where one belongs to a trainable parameter that is not shared."""
        index = {name: k for k, name in enumerate(self.names)}
        engine, layout = self.engine, self.shared.layout
        if any(site[0] not in index and engine.parameters[site[0]].requires_grad for site in sites):
            return None
        self.first_site: dict[int, int] = {}  # parameter -> the site whose place is the parameter's own
        self.more_sites: dict[int, list[int]] = {}  # parameter -> its further sites, as they are added up
        shared = [s for s, site in enumerate(sites) if site[0] in index]
        order = sorted(shared, key=lambda s: -site_position(engine.staged, sites[s]))
        for site in order:
            k = index[sites[site][0]]
            if self.first_site.setdefault(k, site) != site:
                self.more_sites.setdefault(k, []).append(site)
        further = [s for found in self.more_sites.values() for s in found]
        behind = RowLayout.of([engine.parameters[sites[s][0]] for s in further], start=layout.num_bytes)
        offsets = {s: layout.offsets[k] for k, s in self.first_site.items()} | dict(
            zip(further, behind.offsets, strict=True)
        )
        whole = RowLayout(offsets=tuple(offsets.get(s, NOWHERE) for s in range(len(sites))), num_bytes=behind.num_bytes)
        exact = engine.layout.reduction == "exact"
        store = None if self.reducer is None else self.reducer.store
        self.reducer = SharedReducer(engine.transport, self.reach, buckets, whole, exact=exact, store=store)
        self.by_site: list[bool] = []
        self.seen = None
        return self.reducer

    def fold(self, factor: float) -> Generator[None, None, list[Tensor]]:
        """Add up this rank's share of all members' gradients; give the sums, piece by piece.

        All members' gradients must be in their rows.
        """
        assert self.reducer is not None
        by_site = yield from self.reducer.presence()
        if by_site != self.by_site:
            self._note_presence(by_site)
        sums = []
        for piece in self.pieces.pieces:
            if not self.present[piece.first]:
                piece.parameter.grad = None
                continue
            grad = yield from self.reducer.fold(piece.start, piece.stop, piece.parameter.dtype)
            for part in self.pieces.parts_of(piece) if self.more_sites else ():
                yield from self._add_sites(part, grad[self.pieces.place(piece, part)], by_site)
            piece.parameter.grad = grad if piece.parameter.ndim else grad[0]
            sums.append(grad)
        if factor != 1.0 and sums:
            torch._foreach_mul_(sums, factor)
        return sums

    def _note_presence(self, by_site: Sequence[bool]) -> None:
        """Take in which sites have a gradient in this step, and so which parameters are updated."""
        self.by_site = list(by_site)
        sites = [[s, *self.more_sites.get(k, ())] for k, s in self.first_site.items()]
        present = dict(zip(self.first_site, (any(by_site[s] for s in each) for each in sites), strict=True))
        self.present = [present.get(k, False) for k in range(len(self.names))]
        self.pieces.part(self.present)

    def _add_sites(self, part: Part, grad: Tensor, by_site: Sequence[bool]) -> Steps:
        """Add what a parameter's further sites bring, the one used last first."""
        if not by_site[self.first_site[part.index]]:
            grad.fill_(-0.0)
        for site in self.more_sites.get(part.index, ()):
            if by_site[site]:
                assert self.reducer is not None
                start = self.reducer.layout.offsets[site]
                size = grad.element_size()
                more = yield from self.reducer.fold(start + part.low * size, start + part.high * size, grad.dtype)
                grad.add_(more)

    def show_gradients(self) -> None:
        """Let the parameters' ``.grad`` be the sums (whole once every member has folded its share)."""
        assert self.reducer is not None
        segment, offset = self.reducer.place_of_sums
        if self.seen is None or self.seen_at != (segment, offset):
            self.seen, self.seen_at = PrivateView(segment, offset, self.shared.layout.num_bytes), (segment, offset)
            pairs = zip(self.shared.layout.offsets, self.shared.parameters, strict=True)
            self.views = [view_like(self.seen.bytes, o, p) for o, p in pairs]
        elif self.seen.bytes._version != self.seen_version:  # the user has changed some since the last step
            self.seen.forget(self.seen.changed())
        self.seen_version = self.seen.bytes._version  # one for all views
        for parameter, view, present in zip(self.shared.parameters, self.views, self.present, strict=True):
            parameter.grad = view if present else None

    # ---- the update ------------------------------------------------------------------------------------

    def take_changes(self) -> list[tuple[int, int]]:
        """Take what the user's code has written to parameters on all ranks; give the ranges of the row."""
        changed: list[tuple[int, int]] = self.shared.changed()
        self.shared.take_over(changed, self.pieces.share)
        return changed

    def update(self) -> None:
        """Run the optimizer on this rank's pieces."""
        optimizer = self.engine.optimizer
        assert optimizer is not None
        with kernel_chosen(optimizer, self.kernel):
            bare_step(optimizer)

    # ---- state -----------------------------------------------------------------------------------------

    def gather_states(self) -> Generator[None, None, dict[str, State]]:
        """Give the optimizer's whole state of this rank's parameters, on every replica. Every replica calls it."""
        engine = self.engine
        mine = [(part, {k: copied(v) for k, v in state.items()}) for part, state in self.pieces.states()]
        members = yield from wait_for(engine.transport.all_gather_object(mine, self.reach.here))
        found: dict[int, list[tuple[Part, State]]] = {}
        for part, state in (pair for each in members for pair in each):
            found.setdefault(part.index, []).append((part, state))
        parameters = self.shared.parameters
        return {self.names[k]: whole_state(parameters[k], parts) for k, parts in sorted(found.items())}

    def load_states(self, states: dict[str, State]) -> None:
        """Take over an optimizer state by names of parameters: this rank's share of it."""
        index = {name: k for k, name in enumerate(self.names)}
        self.by_site = []
        self.pieces.load({index[n]: s for n, s in states.items() if n in index})


def site_position(staged: Staged, site: Site) -> int:
    """Give the node at which a site's unit (or row) begins: the order of the forward."""
    group = site[1]
    if group >> PART_BITS > 0:
        return group >> PART_BITS
    return staged.units[group].start if group >= 0 else -1 - group


def _overlap(parameters: Sequence[Tensor]) -> bool:
    """Tell whether some parameters have memory in common."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in parameters)
    return any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans))


def _has_sparse(engine: Engine) -> bool:
    """Tell whether some embedding asks for sparse gradients."""
    if any(getattr(module, "sparse", False) is True for module in engine.model.modules()):
        return True
    return any(
        node.kwargs.get("sparse") is True
        or (node.target is F.embedding and node.args[EMBEDDING_SPARSE : EMBEDDING_SPARSE + 1] == (True,))
        for node in engine.staged.graph.nodes
    )
