"""Reports about plans: estimates beside what is measured (B089), every parameter once and lazy layers (B091)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshwise as mw
from meshwise.cost.estimate import CPU_RULES, NOTHING, Pricing, Workload, cut_stages, memory_of
from meshwise.cost.stage import StageTable, UnitPrice
from meshwise.errors import JobError
from meshwise.launch.local import run_ranks
from meshwise.layout import Layout
from meshwise.planning import survey
from meshwise.runtime.elsewhere import profiles_elsewhere
from meshwise.session import Session

# ---- B089 ------------------------------------------------------------------------------------------------


CUTS = (2,)  # the same for what is run and what is predicted


def three_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256))


def linear_job() -> mw.Job:
    data = TensorDataset(torch.randn(128, 256), torch.randn(128, 256))
    return mw.Job(
        model=three_linears,
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        train_data=data,
        batch_size=64,
        microbatch_size=16,
    )


def held_bytes(context: Any, layout: str) -> dict[str, int]:
    """Run two steps on one rank, and count the bytes of what it keeps by itself."""
    job = linear_job()
    with Session(job, layout, device=context.device, cuts=CUTS if layout == "pp=2" else None) as session:
        batches = iter(session.batches())
        for _ in range(2):
            session.step(next(batches))
        worker = session.worker
        parameters = [p for n, p in worker.model.named_parameters() if n in worker.held]
        assert worker.engine.optimizer is not None
        states = [v for s in worker.engine.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return {
            "parameters": sum(p.numel() * p.element_size() for p in parameters),
            "optimizer": sum(v.numel() * v.element_size() for v in states),
        }


def predicted(layout: Layout) -> Any:
    job = linear_job()
    profile = profiles_elsewhere(job, (16,))[0]
    table = StageTable(profile, [UnitPrice(seconds=NOTHING)] * len(profile.units), tp=layout.tp)
    workload = Workload(batch_size=64, num_microbatches=4)
    cuts = CUTS if layout.pp == 2 else ()
    rules = replace(CPU_RULES, shares_host=layout.zero == 0)
    return memory_of(profile, workload, layout, cut_stages(table, cuts), rules)


@pytest.mark.parametrize("text", ["dp=1", "dp=2", "pp=2"])
def test_b089_state_is_what_ranks_hold(text: str) -> None:
    """Parameters and optimizer state: measured over estimated is in [0.8, 1.0]; replicas of a host part the state.

    Such replicas map the parameters twice, to read them all and to write their share: that counts as twice.
    """
    layout = Layout.parse(text)
    measured = run_ranks(lambda c: held_bytes(c, text), layout.num_devices)
    for rank, found in enumerate(measured):
        parts = predicted(layout)[rank % layout.pp].parts
        assert 0.8 <= found["parameters"] * (2 if layout.dp > 1 else 1) / parts["parameters"] <= 1.0
        assert 0.8 <= found["optimizer"] / parts["optimizer"] <= 1.0


def test_b089_sharding_halves_the_state() -> None:
    """ZeRO 3 over two: at most half of the state, and the largest layers gathered; ZeRO 1: half of the optimizer's."""
    sharded, first = (predicted(Layout(dp=2, zero=z))[0].parts for z in (3, 1))
    plain = predicted(Layout())[0].parts
    largest = 2 * (256 * 256 + 256) * 4
    for part in ("parameters", "gradients"):
        assert sharded[part] <= plain[part] / 2 + largest, part
    assert sharded["optimizer"] == plain["optimizer"] / 2 == first["optimizer"]


def test_b089_the_peak_is_near_what_a_process_takes() -> None:
    """Measured resident peak over the estimate is in [0.6, 1.1] for one device, two replicas and two stages."""
    from meshwise.planner.search import consider
    from meshwise.trials import Trial, Turn, run_trials

    found = survey(linear_job(), devices=2, seconds=0.2)
    task = found.task
    for text in ("dp=1", "dp=2", "pp=2"):
        candidate = consider(task, task.profiles[0], task.workloads[0], Layout.parse(text))
        trial = Trial(layout=candidate.layout, cuts=candidate.cuts or None)
        run_trials(linear_job(), [trial], turn=Turn(seconds=0.05, max_steps=4, look=False), turns=1)
        assert 0.6 <= max(trial.peaks) / candidate.estimate.peak_bytes <= 1.1


# ---- B091 ------------------------------------------------------------------------------------------------


class Container(nn.Module):
    """Hold a parameter and a buffer of its own beside layers, one of them lazy, and one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))
        self.first = nn.Linear(8, 8)
        self.lazy = nn.LazyLinear(4)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lazy(self.again(self.first(x) * self.scale + self.shift))


def container_job(count: int = 16, model: Any = Container) -> mw.Job:
    data = TensorDataset(torch.randn(count, 8), torch.randn(count, 4))
    return mw.Job(
        model=model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data, batch_size=8
    )


def test_b091_a_plan_counts_every_parameter_and_buffer_once() -> None:
    """Those that the container holds itself too, those of a lazy layer, and a shared one once."""
    profile = profiles_elsewhere(container_job(), (2,))[0]
    model = Container()
    model(torch.zeros(1, 8))
    assert set(profile.parameters) == {n for n, _ in model.named_parameters()}
    assert set(profile.buffers) == {n for n, _ in model.named_buffers()}
    counted = sum(p.num_elements for p in profile.parameters.values())
    assert counted == sum(p.numel() for p in model.parameters())
    stages = cut_stages(StageTable(profile, [UnitPrice(seconds=NOTHING)] * len(profile.units)), ())
    assert stages[0].parameter_bytes == 4 * counted


@pytest.mark.parametrize("model", [Container, Container()], ids=["function", "module"])
def test_b091_a_lazy_layer_is_built_from_a_sample(model: Any) -> None:
    """The model trains the same on one device and on two, and the user's own module stays as it was."""
    job = container_job(model=model)
    assert mw.verify(job, "dp=2", steps=2, plain=False)
    if isinstance(model, nn.Module):
        assert isinstance(model.lazy.weight, nn.parameter.UninitializedParameter)


@pytest.mark.parametrize("model", [Container, Container()], ids=["function", "module"])
def test_b091_without_a_sample_the_lazy_layer_is_named(model: Any) -> None:
    """Where the data gives no sample, the plan is refused with the name of the layer."""
    with pytest.raises(JobError, match="lazy.weight"):
        profiles_elsewhere(container_job(count=0, model=model), (2,))


def test_what_is_priced_is_what_is_cut() -> None:
    """Parameters of both stages of a cut add up to the model's, none twice."""
    profile = profiles_elsewhere(linear_job(), (16,))[0]
    table = StageTable(profile, [UnitPrice(seconds=NOTHING)] * len(profile.units))
    pricing = Pricing(table=table, rules=CPU_RULES)
    whole = cut_stages(pricing.table, ())[0].parameter_bytes
    assert sum(s.parameter_bytes for s in cut_stages(pricing.table, (1,))) == whole
