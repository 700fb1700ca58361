"""Where this process stands: started by torchrun, by Slurm, or alone; its device and its process group."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from meshwise.errors import LaunchError
from meshwise.launch.forkserver import num_cores

Kind = Literal["torchrun", "slurm", "single"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Hold the place of one process among all that were started together.

    ``local_rank`` counts within this host; the two ``master`` fields say where rank 0 listens, and are
    empty where nobody was started beside this process.
    """

    kind: Kind = "single"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0

    def __str__(self) -> str:
        place = f"rank {self.rank} of {self.world_size} ({self.kind})"
        return f"{place} at {self.master_addr}:{self.master_port}" if self.master_addr else place


def detect() -> Environment:
    """Read from the environment variables who started this process.

    Raises LaunchError where the variables contradict one another or one is missing.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_torchrun()
    if _number("SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in os.environ:
        return _from_slurm()
    return Environment()


def _from_torchrun() -> Environment:
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"RANK={rank} is not one of the {world_size} ranks that WORLD_SIZE={world_size} names"
        )
    return Environment(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", rank),
        local_world_size=_number("LOCAL_WORLD_SIZE", world_size),
        master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number("MASTER_PORT", 29500),
    )


def _from_slurm() -> Environment:
    """Read an srun step; its port follows from the job's number, so that two jobs on a host differ."""
    world_size = _number("SLURM_STEP_NUM_TASKS")
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1")
    return Environment(
        kind="slurm",
        rank=_number("SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number("SLURM_LOCALID", 0),
        local_world_size=_tasks_here(world_size),
        master_addr=os.environ.get("MASTER_ADDR") or first_host(hosts),
        master_port=_number("MASTER_PORT", 20000 + _number("SLURM_JOB_ID", 0) % 12000),
    )


def _tasks_here(world_size: int) -> int:
    """Expand ``2(x3),1`` (tasks on each host of the step) and pick this host's number."""
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else world_size


def first_host(nodes: str) -> str:
    """Return the first name of a Slurm host list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise LaunchError(
            f"the Slurm host list {nodes!r} names no host; set MASTER_ADDR to the host of rank 0"
        )
    return match[1] + (match[2] or "") + (match[3] or "")


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(f"the environment variable {name} must be a whole number, not {text!r}") from None


def accelerator_type() -> str:
    """Return the type of this host's accelerators (``cuda``, ``xpu``, ...), or ``cpu`` where it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def num_devices(device_type: str | None = None) -> int:
    """Count the devices of a type here: accelerators, or for ``cpu`` the cores this process may use."""
    if (device_type or accelerator_type()) == "cpu":
        return num_cores()
    return torch.accelerator.device_count()


def device_for(local_rank: int, device_type: str | None = None) -> torch.device:
    """Return the device of a rank on this host: the accelerator of that number, or the CPU.

    Raises LaunchError where the host has fewer accelerators than ranks.
    """
    kind = device_type or accelerator_type()
    if kind == "cpu":
        return torch.device("cpu")
    check_enough(local_rank + 1, kind)
    return torch.device(kind, local_rank)


def check_enough(num_ranks: int, device_type: str) -> None:
    """Raise LaunchError unless every rank of this host can have an accelerator of its own."""
    found = accelerator_type()
    available = num_devices(device_type) if found == device_type else 0
    if device_type != "cpu" and num_ranks > available:
        raise LaunchError(
            f"{num_ranks} ranks on this host need {num_ranks} {device_type} devices, but it has {available}; "
            f"start at most {available} ranks, or train on the CPU (device='cpu')"
        )


def backend_for(device: torch.device) -> str:
    """Return the communication backend for tensors on this device: ``gloo`` for the CPU."""
    if device.type == "cpu":
        return "gloo"
    return dist.get_default_backend_for_device(device)


def init_process_group(
    environment: Environment,
    *,
    device: torch.device,
    store: Store | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Join all ranks to the default process group. Every rank must call it.

    With an accelerator, tensors on the CPU still go through gloo. ``store`` is the meeting point of ranks
    started by ``run_ranks``; without it the ranks meet at ``master_addr:master_port``. Raises LaunchError
    where that port is taken or nobody answers there.
    """
    backend = backend_for(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{backend}"
    if store is None and environment.kind == "single":
        store = HashStore()
    try:
        dist.init_process_group(
            backend,
            init_method=None if store is not None else _meeting_point(environment),
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    except dist.DistNetworkError as error:
        raise LaunchError(_no_meeting(environment, error)) from error


def _meeting_point(environment: Environment) -> str:
    """Give torch the address; under torchrun it must read the variables itself to use the agent's store."""
    if environment.kind == "torchrun":
        os.environ.setdefault("MASTER_ADDR", environment.master_addr)
        os.environ.setdefault("MASTER_PORT", str(environment.master_port))
        return "env://"
    return f"tcp://{environment.master_addr}:{environment.master_port}"


def _no_meeting(environment: Environment, error: Exception) -> str:
    place, port = environment.master_addr, environment.master_port
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return f"port {port} on {place} is already in use by another program; set MASTER_PORT to a free port"
    return f"rank {environment.rank} could not meet the others at {place}:{port} ({error})"
