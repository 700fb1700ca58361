"""The frameworks beside which meshwise is measured, each used as its documentation says for a loop of one's own.

They are not needed to use meshwise or to run the benchmarks: ``peers.txt`` lists them, and one that is not
installed is shown as such. All run over gloo, with the best settings of DDP where they build on it.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from .cases import loss
from .contender import Contender
from .loops import Loop, build, feed, optimizer_for


def accelerate(contender: Contender) -> Loop:
    """Train with Accelerate: model and optimizer prepared, its own backward, DDP at its best settings."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**contender.options["ddp"])])
    if accelerator.num_processes != contender.ranks:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes, not {contender.ranks}")
    plain = build(contender)
    model, optimizer = accelerator.prepare(plain, optimizer_for(plain.parameters()))
    return Loop(contender, model, optimizer, accelerator.backward)


def fabric(contender: Contender) -> Loop:
    """Train with Lightning Fabric: set up by its DDP strategy at the best settings of DDP, its own backward."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", **contender.options["ddp"])
    made = Fabric(accelerator="cpu", devices=contender.ranks, strategy=strategy)
    made.launch()
    if made.world_size != contender.ranks:
        raise RuntimeError(f"Fabric sees {made.world_size} processes, not {contender.ranks}")
    plain = build(contender)
    model, optimizer = made.setup(plain, optimizer_for(plain.parameters()))
    return Loop(contender, model, optimizer, made.backward)


class DeepSpeed:
    """Train with DeepSpeed's engine under ZeRO stage 1, with the same torch optimizer."""

    def __init__(self, contender: Contender) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", str(contender.ranks))
        import deepspeed as package

        config = {
            "train_micro_batch_size_per_gpu": contender.options["batch"] // contender.ranks,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,  # it has no SGD of its own
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 30,
        }
        plain = build(contender)
        optimizer: Any = optimizer_for(plain.parameters())
        self.engine: Any = package.initialize(model=plain, optimizer=optimizer, config=config)[0]
        self.batches = feed(contender)

    def run(self, steps: int) -> None:
        """Run this many optimizer steps; the engine sets gradients to None itself."""
        for _ in range(steps):
            x, y = next(self.batches)
            value: Tensor = loss(self.engine(x), y)
            self.engine.backward(value)
            self.engine.step()
            value.item()
