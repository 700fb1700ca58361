"""Starting ranks: results, surroundings, what travels to a rank, and where a process finds itself."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.data import DataLoader, TensorDataset

import meshwise
from meshwise.errors import LaunchError, RankError
from meshwise.launch import environment, forkserver, rendezvous, ship
from meshwise.launch.local import run_ranks
from meshwise.launch.rank import RankContext

pytestmark = pytest.mark.timeout(120)
SOURCE = str(Path(next(iter(meshwise.__path__))).parent)


def run(function: Callable[[RankContext], Any], num_ranks: int, **options: Any) -> list[Any]:
    return run_ranks(function, num_ranks, device="cpu", timeout=60, **options)


def python(arguments: list[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    temp = cwd / "temp"
    temp.mkdir(exist_ok=True)
    variables = os.environ | {"PYTHONPATH": SOURCE, "TMPDIR": str(temp)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=100, check=False, **options
    )


def test_results_come_back_in_rank_order() -> None:
    """The list of results is ordered by rank, whoever finishes first."""

    def after_the_next(context: RankContext) -> int:
        if context.rank < 2:
            dist.recv(torch.zeros(1), context.rank + 1)
        if context.rank > 0:
            dist.send(torch.zeros(1), context.rank - 1)
        return context.rank * 10

    assert run(after_the_next, 3) == [0, 10, 20]


def test_ranks_exchange_tensors_and_return_them() -> None:
    """The default process group is up, and a tensor survives the way back."""

    def total(context: RankContext) -> torch.Tensor:
        values = torch.full((1000, 100), float(context.rank + 1))
        dist.all_reduce(values)
        return values

    for result in run(total, 2):
        assert torch.equal(result, torch.full((1000, 100), 3.0))


def test_events_reach_the_listener_in_order() -> None:
    """Every event that a rank emits is heard once, in the order it was emitted."""

    def count(context: RankContext) -> None:
        for number in range(20):
            context.emit((context.rank, number))

    heard: list[tuple[int, int]] = []
    run(count, 2, on_event=heard.append)
    assert [number for rank, number in heard if rank == 1] == list(range(20))
    assert len(heard) == 40


def test_a_rank_resembles_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has the parent's directory, variables, search path and default dtype of this moment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWISE_TEST_VALUE", "seen")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    torch.set_default_dtype(torch.float64)
    try:
        seen = run(_surroundings, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [(str(tmp_path), "seen", str(tmp_path / "modules"), torch.float64)]


def _surroundings(context: RankContext) -> tuple[str, str, str, torch.dtype]:
    return os.getcwd(), os.environ["MESHWISE_TEST_VALUE"], sys.path[0], torch.get_default_dtype()


def test_a_rank_prints_where_its_parent_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """What a rank prints appears in the parent's streams of this moment, also if the rank is killed then."""

    def speak(context: RankContext) -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError):
        run(speak, 1)
    assert capfd.readouterr() == ("to stdout\n", "to stderr\n")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rank_has_the_threads_that_were_asked_for(threads: int) -> None:
    """Two ranks use one thread each unless told otherwise, and then just that number (B086)."""
    options = {} if threads == 1 else {"threads": threads}
    seen = run(lambda _: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]), 2, **options)
    assert seen == [(threads, str(threads))] * 2


def test_a_rank_can_use_loader_workers() -> None:
    """A rank is no daemon: it may start the workers of a DataLoader, which see its data."""

    def add_up(context: RankContext) -> float:
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=1)
        return sum(float(batch.sum()) for (batch,) in loader)

    assert run(add_up, 1) == [28.0]


def test_a_loopback_device_is_named_but_the_users_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local ranks talk over loopback, so that nothing depends on what the host's name resolves to."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert run(lambda _: os.environ.get("GLOO_SOCKET_IFNAME"), 1) == [loopback]


def test_two_jobs_of_one_process_run_at_once() -> None:
    """Two threads may each run a job at the same time: no port or file is shared (B079)."""
    results: list[list[int]] = []

    def job() -> None:
        results.append(run(lambda context: int(_sum_of_ranks(context)), 2))

    threads = [threading.Thread(target=job) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1, 1], [1, 1]]


def _sum_of_ranks(context: RankContext) -> torch.Tensor:
    value = torch.tensor(float(context.rank))
    dist.all_reduce(value)
    return value


PLAIN_SCRIPT = """
import torch, torch.distributed as dist
from meshwise.launch.local import run_ranks
print("script runs")
class Net(torch.nn.Linear):
    pass
net = Net(2, 1)
def train(context):
    dist.all_reduce(next(net.parameters()).data)
    return type(net).__name__, context.rank
for _ in range(5):
    assert run_ranks(train, 2, device="cpu", timeout=60) == [("Net", 0), ("Net", 1)]
print("done")
"""


def test_two_plain_scripts_run_five_jobs_each_at_once(tmp_path: Path) -> None:
    """Scripts without a main guard run once, ten jobs of two programs never meet, nothing stays (B079)."""
    (tmp_path / "script.py").write_text(PLAIN_SCRIPT)
    temp = tmp_path / "temp"
    temp.mkdir()
    variables = os.environ | {"PYTHONPATH": SOURCE, "TMPDIR": str(temp)}
    command = [sys.executable, "script.py"]
    programs = [
        subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [program.communicate(timeout=100)[0] for program in programs] == ["script runs\ndone\n"] * 2
    assert [program.returncode for program in programs] == [0, 0]
    assert _left_in(temp) == []


def _left_in(temp: Path) -> list[str]:
    """List what is left in a temporary folder, torch's own compile cache aside."""
    return [path.name for path in temp.iterdir() if not path.name.startswith("torchinductor")]


INTERACTIVE = """
import torch, torch.distributed as dist
from meshwise.launch.local import run_ranks
class Net(torch.nn.Linear):
    schedule = staticmethod(lambda step: 0.5 ** step)

class Data(torch.utils.data.Dataset):
    def __init__(self): self.handle = open("data.txt")

class Job: pass

job = Job()
job.net, job.schedule = Net(2, 1), lambda step: step + 1
def train(context):
    torch.nn.init.constant_(job.net.weight, job.net.schedule(1) * job.schedule(1))
    return job.net

for _ in range(2):
    nets = run_ranks(train, 2, device="cpu", timeout=60)
    print("weights", [net.weight.tolist() for net in nets], isinstance(nets[0], Net))


job.train_data = Data()
run_ranks(train, 2, device="cpu")
"""


def test_interactive_classes_and_lambdas_travel_and_an_open_file_is_refused(tmp_path: Path) -> None:
    """What was typed at a prompt runs in ranks, twice; then an open file is refused by its name (B081)."""
    (tmp_path / "data.txt").write_text("text")
    ended = python(["-i", "-q"], tmp_path, input=INTERACTIVE)
    assert ended.stdout.count("weights [[[1.0, 1.0]], [[1.0, 1.0]]] True") == 2, ended.stderr
    assert "train_data.handle (TextIOWrapper) cannot be sent to the ranks" in ended.stderr
    assert "__getitem__" in ended.stderr
    assert _left_in(tmp_path / "temp") == []


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: Holder({"a": [0, Holder(lock)]}), "value['a'][1].value (lock)"),
        (lambda lock: nn.Sequential(_with(nn.Linear(1, 1), guard=lock)), "0.guard (lock)"),
        (lambda lock: partial(_with, nn.Linear(1, 1), guard=lock), "['guard'] (lock)"),
        (lambda lock: lambda: lock, "lock (lock)"),
        (lambda lock: lock, "this (lock)"),
    ],
)
def test_the_smallest_part_that_cannot_be_sent_is_named(make: Callable[[Any], Any], path: str) -> None:
    """The message gives the attribute path and the type of the one thing in the way."""
    with pytest.raises(LaunchError) as caught:
        ship.dumps(make(threading.Lock()))
    assert str(caught.value).startswith(f"{path} cannot be sent to the ranks: ")


def _with(module: nn.Module, **attributes: Any) -> nn.Module:
    module.__dict__.update(attributes)
    return module


def test_a_loop_in_an_object_does_not_stop_the_search() -> None:
    """An object that holds itself beside an unsendable thing is still searched to the end."""
    holder = Holder(None)
    holder.value = [holder, threading.Lock()]
    with pytest.raises(LaunchError, match=r"^value\[1\] \(lock\)"):
        ship.dumps(holder)


def test_a_module_from_a_loose_file_travels_whole(tmp_path: Path) -> None:
    """A class from a file that is on no search path reaches a rank; its module is not left registered."""
    (tmp_path / "loose_file.py").write_text("class Net:\n    size = 3\n")
    spec = importlib.util.spec_from_file_location("loose_file", tmp_path / "loose_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loose_file"] = module
    try:
        spec.loader.exec_module(module)
        net = module.Net
        assert run(lambda _: net.size, 1) == [3]
    finally:
        del sys.modules["loose_file"]


def _old() -> nn.Module:
    with pytest.warns(FutureWarning):
        return old_weight_norm(nn.Linear(4, 4))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "old weight norm": _old,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
}


def _normed(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(NORMS[kind](), nn.Tanh(), nn.Linear(4, 1))
    model(torch.ones(2, 4))
    return model


def _train(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.ones(2, 4) * step) + model(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", NORMS)
def test_normed_layers_train_in_ranks_as_at_home(kind: str) -> None:
    """Layers that pickle refuses arrive whole: weights and power-iteration vectors end bit-equal (B051)."""
    at_home = _train(_normed(kind))
    model = _normed(kind)
    for there in run(lambda _: _train(model), 2):
        assert there.keys() == at_home.keys()
        assert all(torch.equal(there[name], at_home[name]) for name in at_home)


def test_ties_views_and_frozen_parameters_stay_as_they_are() -> None:
    """Sending keeps one parameter one, a view a view, and a frozen parameter frozen."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    memory = torch.arange(6.0)
    one, two, whole, part = ship.loads(ship.dumps((first, second, memory, memory[2:4])))
    assert one.weight is two.weight
    assert not one.bias.requires_grad and two.bias.requires_grad
    part.zero_()
    assert whole.tolist() == [0.0, 1.0, 0.0, 0.0, 4.0, 5.0]


def test_hooks_on_parameters_arrive() -> None:
    """Gradient hooks work after sending, also one that holds its own parameter, also on frozen ones."""
    layer: Any = nn.Linear(1, 1, bias=False)
    layer.weight.register_hook(lambda gradient: gradient * layer.weight.detach() * 0 + 5)
    calls: list[str] = []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("called"))
    frozen: Any = nn.Parameter(torch.ones(1))
    frozen.register_hook(lambda gradient: gradient * 0)
    frozen.requires_grad_(False)
    there, there_frozen, there_calls = ship.loads(ship.dumps((layer, frozen, calls)))
    there(torch.ones(1, 1)).sum().backward()
    assert there.weight.grad.tolist() == [[5.0]]
    assert there_calls == ["called"] and calls == []
    assert not there_frozen.requires_grad and len(there_frozen._backward_hooks) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_of_any_dtype_and_shape_survive(dtype: torch.dtype) -> None:
    """Empty, strided and odd-sized tensors come back equal."""
    values = torch.arange(12).reshape(3, 4).to(dtype)
    for value in (values, values.T, values[:, 1], values[:0], values[1, 1]):
        back = ship.loads(ship.dumps(value))
        assert torch.equal(back, value) and back.stride() == value.stride()


def _refuse_libuv(store: Any) -> Any:
    """Make a store as builds without libuv have it."""

    def refusing(*args: Any, **options: Any) -> Any:
        if options["use_libuv"]:
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
        return store(*args, **options)

    return refusing


@pytest.mark.parametrize(("platform", "has_groups"), [("win32", False), ("darwin", True)])
def test_other_platforms_and_builds_still_run(
    platform: str, has_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that refuses libuv is asked without it, ranks are spawned, and absent signals unused (B082)."""
    monkeypatch.setattr(rendezvous, "TCPStore", _refuse_libuv(vars(rendezvous)["TCPStore"]))
    monkeypatch.setattr(sys, "platform", platform)
    if not has_groups:
        monkeypatch.delattr(os, "killpg")
    assert forkserver.start_context().get_start_method() == "spawn"
    assert forkserver.has_process_groups() == has_groups
    assert run(_rank_sum, 2) == [1.0, 1.0]


def _rank_sum(context: RankContext) -> float:
    return float(_sum_of_ranks(context))


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_torchrun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that torchrun sets give this process's place."""
    for name, value in (TORCHRUN | {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}).items():
        monkeypatch.setenv(name, value)
    assert environment.detect() == environment.Environment(
        kind="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="host",
        master_port=1234,
    )


def test_contradicting_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank outside the world is refused with both numbers."""
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LaunchError, match="RANK=4 .* WORLD_SIZE=4"):
        environment.detect()


def test_a_slurm_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An srun step gives rank, host-local rank and the first host; a step of one task is no job of many."""
    step = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "4,2",
        "SLURM_STEP_NODELIST": "gpu[03-04],x1",
        "SLURM_JOB_ID": "77",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    found = environment.detect()
    assert (found.kind, found.rank, found.local_rank, found.local_world_size) == ("slurm", 5, 1, 2)
    assert (found.master_addr, found.master_port) == ("gpu03", 20077)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert environment.detect().kind == "single"


def test_a_busy_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun's variables a port that is taken is named, with the variable to change (B079)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=f"port {port} .* already in use .* MASTER_PORT"):
            environment.init_process_group(environment.detect(), device=torch.device("cpu"))


def test_the_cpu_is_a_device_with_as_many_places_as_cores() -> None:
    """On the CPU every rank has the same device, gloo, and as many ranks fit as there are usable cores."""
    assert environment.device_for(7, "cpu") == torch.device("cpu")
    assert environment.backend_for(torch.device("cpu")) == "gloo"
    assert environment.num_devices("cpu") == environment.num_cores() >= 1


def test_more_ranks_than_accelerators_are_refused() -> None:
    """Ranks never share an accelerator in silence."""
    with pytest.raises(LaunchError, match="need 4096 cuda devices, but it has"):
        run_ranks(_rank_sum, 4096, device="cuda")
