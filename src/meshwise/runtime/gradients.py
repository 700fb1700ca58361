"""Gradients of one rank's step: collected from the cells slot by slot, handed to the exact reduction.

Under dp alone the exchange of a bucket starts while the backward of the step's last microbatch still runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model.codegen import Site
from ..model.stages import Staged
from ..parallel.reduce import Reducer, make_buckets
from ..parallel.shared_reduce import SharedReducer
from ..parallel.transport import Pending, wait_for
from .step import mixed_step

if TYPE_CHECKING:
    from .engine import Engine

BUCKET_BYTES = 4  # bytes an element counts for when sites are grouped in buckets


class Gradients:
    """Own the reducer and its buckets; reset by :meth:`begin` at each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reducer: Reducer | SharedReducer | None = None
        self.entered: Pending | None = None  # all replicas have begun the step: the last one's gradients may go
        self.staged: Staged | None = None  # the graph that sites and buckets were last made for
        self.sites: list[tuple[int, Site]] = []
        self.bucket_of: dict[tuple[int, int], list[int]] = {}
        self.overlap_hooks: list[Any] = []
        self.overlap_for: int | None = None  # the set of trainable parameters that the hooks were made for
        self.armed = self.single = self.in_place = False
        self.mark = 0.0
        self.unsettled: tuple[int, int, int, list[Tensor | None]] | None = None
        self.sums: dict[tuple[int, Site], Tensor | None] = {}
        self.row_sums: dict[tuple[int, int], dict[int, list[Tensor | None]]] = {}

    def begin(self, staged: Staged) -> Generator[None, None, None]:
        """Start a step: buckets for the sites of this rank's stages, and how replicas share the slots."""
        engine = self.engine
        yield from engine.commons.open()
        self._setup(staged)
        assert self.reducer is not None
        self.sums, self.row_sums, self.unsettled = {}, {}, None
        self.pushed = dict.fromkeys(range(len(self.reducer.buckets)), 0)
        self.next_launch = 0
        low, high = engine.share.replicas[engine.dp_index]
        self.num_slots = high - low
        # then autograd itself leaves the whole gradient in each parameter's .grad
        self.in_place = self.single and len(engine.dp_group) == 1 and len(engine.share.slots) == 1
        if engine.commons.active:
            self.entered = engine.transport.tell(self._mark(), engine.dp_group)
        else:
            self._begin_reducer()

    def _begin_reducer(self) -> None:
        engine, reducer = self.engine, self.reducer
        assert reducer is not None and self.staged is not None
        known = self.staged.static and not engine.share.has_idle
        reducer.begin(len(engine.share.slots), engine.share.replicas, presence_known=known, likes=self.likes)

    def _mark(self) -> tuple[float, float]:
        """Say which sites' gradients this replica means to add up, and which parameters it trains."""
        return self.mark, float(self.engine.trainable & 0xFFFFFFFFFFFF)

    def wait_for_replicas(self) -> Generator[None, None, None]:
        """Before the first backward writes to shared rows: see that all replicas have begun, with the same sites.

        Until they have, one's user may still read the last step's gradients.
        """
        if self.entered is None:
            return
        entered, self.entered = self.entered, None
        marks = yield from wait_for(entered)
        if any(mark != marks[0] for mark in marks):
            raise mixed_step(self.engine.step_index)
        fine = False
        if isinstance(self.reducer, SharedReducer) and self.engine.commons.trainable == self.engine.trainable:
            fine = yield from self.reducer.prepare(len(self.engine.share.slots), self.engine.share.replicas)
        if not fine:  # a parameter that is not in the row, or no memory for more rows: exchange messages from now on
            yield from self.engine.commons.close()
            staged, self.staged, self.reducer = self.staged, None, None
            assert staged is not None
            self._setup(staged)
        self._begin_reducer()

    def _setup(self, staged: Staged) -> None:
        engine = self.engine
        fits = not engine.commons.active or isinstance(self.reducer, SharedReducer)
        if self.staged is staged and fits:
            return
        self.staged = staged
        sites = [(s, site) for s in engine.my_stages for site in staged.sites(s)]
        if self.reducer is not None and sites == self.sites and fits:
            return
        self.remove_overlap()
        self.sites, self.bucket_of = sites, {}
        names = [site[0] for _, site in sites]
        whole = engine.layout.num_stages == 1 and len(staged.stages[0]) == 1
        self.single = whole and len(set(names)) == len(names) and all(site[1] >= 0 for _, site in sites)
        self.likes = [engine.parameters[site[0]] for _, site in sites]
        self.mark = float(zlib.crc32(repr(sites).encode()))  # tells replicas whether they mean the same sites
        index = {key: k for k, key in enumerate(sites)}
        buckets: list[list[int]] = []
        for stage in reversed(engine.my_stages):
            for k in reversed(range(len(staged.stages[stage]))):
                mine = [index[stage, s] for s in reversed(staged.stages[stage][k].sites) if s[0]]
                sizes = [engine.parameters[sites[i][1][0]].numel() * BUCKET_BYTES for i in mine]
                grouped = [[mine[i] for i in b] for b in make_buckets(sizes)]
                self.bucket_of[stage, k] = list(range(len(buckets), len(buckets) + len(grouped)))
                buckets.extend(grouped)
        exact = engine.layout.reduction == "exact"
        plain = [site for _, site in sites]
        self.reducer = engine.commons.reducer_for(plain, buckets) if engine.commons.active else None
        if self.reducer is None:
            self.reducer = Reducer(engine.transport, engine.dp_group, buckets, exact=exact)

    def release(self) -> None:
        """Let go of the step's gradients; those of parameters stay in their ``.grad``."""
        self.sums, self.row_sums = {}, {}
        assert self.reducer is not None
        for bucket in self.reducer.buckets:
            bucket.nodes, bucket.pending = {}, None

    def remove_overlap(self) -> None:
        """Take this engine's hooks off the parameters."""
        for handle in self.overlap_hooks:
            handle.remove()
        self.overlap_hooks, self.overlap_for = [], None

    # ---- collecting -----------------------------------------------------------------------------------

    def arm(self, m: int) -> bool:
        """Tell whether gradients of this backward may leave while it runs (dp only, the last microbatch)."""
        engine = self.engine
        alone = engine.layout.num_stages == 1 and len(engine.staged.stages[0]) == 1
        assert self.reducer is not None
        at_once = isinstance(self.reducer, SharedReducer) and len(self.reducer.buckets) == 1
        if not alone or len(engine.dp_group) == 1 or m != engine.local[-1] or at_once:
            return False
        if self.overlap_for != self.engine.trainable:
            self._register_overlap()
        self.waiting = list(self.expected)
        return True

    def aim(self, stage: int, m: int, k: int) -> None:
        """Before a backward, say where its large gradients belong: in the shared row, if they begin a partial sum."""
        if not isinstance(self.reducer, SharedReducer):
            return
        state = self.engine.state(stage, m)[2]
        places = state.places[k]
        if places is None:
            places = state.places[k] = [None] * len(state.segments[k].sites)
        slot = self.engine.share.slot_begin(m)
        if slot is None or not self.reducer.begins(slot):
            places[:] = [None] * len(places)
            return
        key = (id(state), k, slot)
        if key not in self.reducer.aims:
            self.reducer.aims[key] = self._places(stage, k, slot, state.segments[k].sites)
        places[:] = self.reducer.aims[key]

    def _places(self, stage: int, k: int, slot: int, sites: Sequence[Site]) -> list[Tensor | None]:
        assert isinstance(self.reducer, SharedReducer)
        found: dict[Site, Tensor | None] = {}
        for b in self.bucket_of[stage, k]:
            row = self.reducer.place(b, slot)
            assert row is not None
            found |= {self.sites[s][1]: view for s, view in zip(self.reducer.buckets[b].sites, row, strict=True)}
        return [found.get(site) for site in sites]

    def forget_places(self) -> None:
        """Let gradients be where autograd makes them again."""
        for states in self.engine.states.values():
            for state in states.values():
                state.places = [None] * len(state.segments)

    def _register_overlap(self) -> None:
        self.remove_overlap()
        self.overlap_for = self.engine.trainable
        assert self.reducer is not None
        self.expected = [0] * len(self.reducer.buckets)  # gradients of a bucket that can come
        for b, bucket in enumerate(self.reducer.buckets):
            for site in bucket.sites:
                leaf = self.engine.tensors[self.sites[site][1]]
                self.expected[b] += leaf.requires_grad
                if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
                    self.overlap_hooks.append(leaf.register_post_accumulate_grad_hook(self._overlap_hook(b)))  # type: ignore[no-untyped-call]

    def _overlap_hook(self, bucket: int) -> Any:
        def hook(leaf: Tensor) -> None:
            if not self.armed:
                return
            self.waiting[bucket] -= 1
            if self.waiting[bucket] == 0:
                self._push_bucket(bucket, self.engine.local[-1])

        return hook

    def collect(self, stage: int, m: int, k: int, leaf_grads: list[Tensor | None]) -> None:
        """Take the gradients a cell's backward left; in a pipeline they wait for :meth:`settle`."""
        if self.in_place and not leaf_grads:
            return
        if self.engine.layout.pp > 1:
            self.unsettled = (stage, m, k, leaf_grads)
        else:
            self._collect(stage, m, k, leaf_grads)

    def settle(self) -> None:
        """Add up the gradients that wait: after what other ranks wait for is sent, before the next backward."""
        if self.unsettled is not None:
            waiting, self.unsettled = self.unsettled, None
            self._collect(*waiting)

    def _collect(self, stage: int, m: int, k: int, leaf_grads: list[Tensor | None]) -> None:
        """Add a cell's gradients; the slot's last microbatch hands them to the reduction."""
        segment = self.engine.state(stage, m)[2].segments[k]
        if leaf_grads:
            self._add_grads(stage, m, segment.sites, leaf_grads, segment.row_sites, k)
        slot = self.engine.share.slot_end(m)
        if slot is None:
            return
        for bucket in self.bucket_of[stage, k]:
            self._push_bucket(bucket, m)

    def _add_grads(
        self,
        stage: int,
        m: int,
        sites: Sequence[Site],
        grads: Sequence[Tensor | None],
        row_sites: Any,
        k: int,
    ) -> None:
        seen: set[int] = set()
        for site, grad in zip(sites, grads, strict=True):
            if grad is None:
                continue
            leaf = self.engine.tensors[site]
            grad = own_grad(grad, leaf, seen)
            if row_sites and site in row_sites:
                pair = self.row_sums.setdefault((stage, k - 1), {}).setdefault(m, [None, None])
                pair[row_sites.index(site)] = grad.to(torch.float64, copy=True)
            if site[0]:
                leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)

    def _push_bucket(self, bucket: int, m: int) -> None:
        """Hand a bucket's gradients of the slot that ends with microbatch ``m`` to the reduction, once."""
        assert self.reducer is not None
        slot = self.engine.share.slot_end(m)
        assert slot is not None
        done = slot - self.engine.share.replicas[self.engine.dp_index][0] + 1
        if self.pushed[bucket] >= done:
            return
        self.pushed[bucket] = done
        grads = []
        for site in self.reducer.buckets[bucket].sites:
            key = self.sites[site][1]
            leaf = self.engine.tensors[key]
            frozen = key[1] < 0 and not self.engine.parameters[key[0]].requires_grad
            grads.append(None if frozen else leaf.grad)
            leaf.grad = None
        self.reducer.push(bucket, slot, grads)
        while self.next_launch < len(self.pushed) and self.pushed[self.next_launch] == self.num_slots:
            self.reducer.launch(self.next_launch)
            self.next_launch += 1


def own_grad(grad: Tensor, leaf: Tensor, seen: set[int]) -> Tensor:
    """Make a raw gradient one that may be changed in place: in the leaf's layout, shared with no other."""
    if grad.is_sparse:
        return grad
    if grad.stride() != leaf.stride() or not grad.numel() or grad.data_ptr() in seen:
        copy = torch.empty_like(leaf, memory_format=torch.preserve_format)
        return copy.copy_(grad)
    seen.add(grad.data_ptr())
    return grad
