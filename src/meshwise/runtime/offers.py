"""Faster settings that are the user's to choose, since the bits or the number of devices would be others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Hold what offers depend on: the model, how it runs, and this host.

    ``num_ranks`` are those of this host, ``threads`` those of torch in each, ``num_cores`` the cores they may use.
    ``precision`` is the job's. ``flags`` are the processor's, as :func:`processor_flags` gives them.
    """

    device_type: str = "cpu"
    num_ranks: int = 1
    threads: int = 1
    num_cores: int = 1
    precision: str = "own"
    has_convolutions: bool = False
    is_channels_last: bool = False
    flags: frozenset[str] = frozenset()


def offers(facts: Facts) -> list[str]:
    """List what would make a job faster or spare it waiting, each with what it changes. Applies nothing."""
    if facts.device_type != "cpu":
        return []
    return [*_cores(facts), *_channels_last(facts), *_bf16(facts)]


def processor_flags() -> frozenset[str]:
    """Read what this processor can do; empty where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def _cores(facts: Facts) -> list[str]:
    ranks, threads, cores = facts.num_ranks, facts.threads, facts.num_cores
    have = f"{_count(ranks, 'rank')} x {_count(threads, 'thread')} on {_count(cores, 'core')}"
    if ranks > cores:
        return [
            f"{have}: ranks wait for each other's turn. Use devices={cores}: the same work with less waiting, and the "
            "same bits."
        ]
    if ranks * threads > cores:
        return [f"{have}: threads wait for each other's turn. Use threads={cores // ranks}; the bits can change."]
    if ranks * threads * 2 <= cores:
        return [
            f"{have}: {_count(cores - ranks * threads, 'core')} idle. More devices keep the bits; "
            f"threads={cores // ranks} can change them."
        ]
    return []


def _channels_last(facts: Facts) -> list[str]:
    if not facts.has_convolutions or facts.is_channels_last:
        return []
    return [
        "convolutions on a CPU are often faster with channels last: model.to(memory_format=torch.channels_last). A "
        "ResNet's step took 13 % less time; the bits are others."
    ]


def _bf16(facts: Facts) -> list[str]:
    can = sorted(facts.flags & {"amx_bf16", "avx512_bf16", "bf16"})
    if facts.precision != "own" or not can:
        return []
    return [
        f'this processor multiplies bfloat16 itself ({can[0]}): precision="bf16" can take a quarter off a step and '
        "more. It rounds to 8 bits in products, so losses are others; compare the accuracy."
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
