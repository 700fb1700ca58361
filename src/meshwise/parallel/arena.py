"""Blocks of shared memory that a sender fills and a receiver keeps as long as it wants.

Each block begins with a semaphore: 1 means free. The sender takes it; the receiver's tensor gives it back when its
memory is let go. So nothing is copied twice, and steps that are alike always use the same blocks.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import semaphores
from .segment import Address, Segment

FEW_BLOCKS_BYTES = 64 << 20  # a segment has several blocks up to this size
BLOCKS = 4
HEAD = semaphores.SIZE


@dataclass(frozen=True, kw_only=True)
class Block:
    """Name a block: the number of its segment, and the byte at which its semaphore stands."""

    segment: int
    at: int
    semaphore: int  # its address here
    memory: int  # the address of what follows it


class Arena:
    """Hold the blocks that one rank fills."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.blocks: defaultdict[int, list[Block]] = defaultdict(list)

    def take(self, num_bytes: int) -> Block:
        """Give a free block of at least so many bytes. Raises SharedMemoryError where memory is short."""
        size = block_size(num_bytes)
        for block in self.blocks[size]:  # the first free one: it is the likeliest to be in a cache
            if semaphores.take(block.semaphore):
                return block
        self._grow(size)
        return self.take(num_bytes)

    def _grow(self, size: int) -> None:
        count = BLOCKS if size * BLOCKS <= FEW_BLOCKS_BYTES else 1
        segment = Segment.create(count * (HEAD + size))
        base = segment.bytes.data_ptr()
        for k in range(count):
            at = k * (HEAD + size)
            semaphores.create(base + at, 1)
            block = Block(segment=len(self.segments), at=at, semaphore=base + at, memory=base + at + HEAD)
            self.blocks[size].append(block)
        self.segments.append(segment)


def block_size(num_bytes: int) -> int:
    """Round up so that there are few sizes and at most an eighth is lost."""
    unit = max(HEAD, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // unit) * unit


class Borrowed:
    """Map the segments of other ranks, and give tensors that are their blocks."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, int], Segment] = {}
        self.kinds: dict[int, Any] = {}

    def add(self, source: int, number: int, address: Address) -> None:
        """Map a segment that another rank told of."""
        self.segments[source, number] = Segment.attach(address)

    def tensor(self, source: int, number: int, at: int, num_bytes: int) -> Tensor:
        """Give a block's first bytes as a tensor; the block is free again when the tensor's memory is let go."""
        segment = self.segments[source, number]
        size = block_size(num_bytes)
        if size not in self.kinds:
            self.kinds[size] = type("Loan", (ctypes.c_char * size,), {"__del__": _give_back})
        loan = self.kinds[size].from_buffer(segment.map, at + HEAD)
        loan.semaphore, loan.process = segment.bytes.data_ptr() + at, os.getpid()
        return torch.frombuffer(loan, dtype=torch.uint8, count=num_bytes)


def _give_back(loan: Any) -> None:
    if hasattr(loan, "process") and loan.process == os.getpid():  # not in a loader's worker, which inherits tensors
        semaphores.post(loan.semaphore)
