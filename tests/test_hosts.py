"""Replicas on several hosts, pretended on this one: shared memory inside a host, the process group between hosts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshwise as mw
from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext
from meshwise.parallel.connect import HOST_VARIABLE
from meshwise.parallel.hosts import HostsTransport, counterparts
from meshwise.session import Session
from scenarios import assert_same_bits, train_in_memory

NUM_SAMPLES = 44


def net() -> nn.Module:
    """Build a network with weights shared by two layers and with dropout."""
    twice = nn.Linear(16, 16)
    return nn.Sequential(
        *(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2)), *(twice, nn.ReLU(), twice, nn.ReLU()), nn.Linear(16, 3)
    )


def make_job() -> mw.Job:
    """Make a job with clipping, uneven microbatches and a last uneven batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return mw.Job(
        model=net,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        train_data=TensorDataset(x, x.argmax(1) % 3),
        batch_size=20,
        microbatch_size=[3, 5, 4, 1, 7],
        clip_grad_norm=0.5,
    )


@pytest.mark.parametrize("hosts", [(4, 2), (6, 3), (6, 2), (3, 2), (2, 1)], ids=lambda h: f"dp={h[0]} by {h[1]}")
def test_replicas_on_several_hosts_give_the_bits_of_one_device(hosts: tuple[int, int]) -> None:
    """Whole hosts, hosts of one replica, and hosts of unlike numbers end in the state of one device."""
    dp, per_host = hosts
    found = train_in_memory(make_job(), f"dp={dp}", 4, per_host=per_host)
    assert_same_bits(found, train_in_memory(make_job(), "dp=1", 4))
    active = [w.engine.commons.active for w in found.workers]
    assert active == [dp % per_host == 0 and per_host > 1] * dp


def test_fast_reduction_on_several_hosts_agrees_on_all_ranks() -> None:
    """Without the fixed order the replicas of both hosts still end with equal values."""
    run = train_in_memory(make_job(), "dp=4,reduction=fast", 3, per_host=2)
    assert all(worker.engine.commons.active for worker in run.workers)
    for worker in run.workers:
        assert all(torch.equal(p, run.params[name]) for name, p in worker.model.named_parameters())


def test_counterparts_need_hosts_of_one_size() -> None:
    """Those in the same place on each host are named only where every host has as many."""
    assert counterparts([(0, 1), (2, 3)]) == [(0, 2), (1, 3)]
    assert counterparts([(0, 1), (2,)]) == []


def _train(context: RankContext, layout: str) -> dict[str, Any]:
    os.environ[HOST_VARIABLE] = str(context.rank // 2)
    with Session(make_job(), layout) as session:
        for batch in session.batches(epochs=1):
            session.step(batch)
        engine = session.worker.engine
        facts = {"hosts": isinstance(engine.transport, HostsTransport), "active": engine.commons.active}
        return facts | {n: p.detach().clone() for n, p in session.model.named_parameters() if n in session.worker.held}


@pytest.mark.parametrize("layout", ["dp=4", "dp=2,pp=2"])
def test_four_ranks_on_two_hosts(layout: str) -> None:
    """Four real ranks that take themselves to be on two hosts end in the state of one device."""
    one = train_in_memory(make_job(), "dp=1", 3).params
    found = run_ranks(lambda context: _train(context, layout), 4, timeout=100)
    for each in found:
        assert each.pop("hosts")
        assert each.pop("active") == (layout == "dp=4")
        assert each and all(torch.equal(value, one[name]) for name, value in each.items())
