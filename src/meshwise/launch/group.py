"""The ranks that run together, as code that all of them call sees them; one process alone is one of one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class OpenGroup:
    """The default process group, if one is open. Every rank makes every call."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def tell(self, value: Any) -> list[Any]:
        """Give every rank's value to all."""
        told = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(told, value)
        return told
