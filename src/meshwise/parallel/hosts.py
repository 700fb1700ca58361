"""The transport of ranks on several hosts: shared memory inside a host, the process group between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .shared import SharedTransport
from .transport import Group, Pending, ProcessGroupTransport, Transport


def counterparts(parts: Sequence[Group]) -> list[Group]:
    """List the groups of those who have the same place on each host; none where hosts have unlike numbers of ranks."""
    if len({len(part) for part in parts}) > 1:
        return []
    return [tuple(column) for column in zip(*parts, strict=True)]


class HostsTransport:
    """Choose for each message and each group. ``hosts`` are the ranks of each host, in order."""

    def __init__(self, inside: SharedTransport, between: ProcessGroupTransport, hosts: Sequence[Group]) -> None:
        self.rank, self.inside, self.between, self.hosts = inside.rank, inside, between, list(hosts)

    @property
    def note(self) -> str:
        """Say why memory could not be shared."""
        return self.inside.note

    def _for(self, group: Sequence[int]) -> Transport:
        return self.inside if all(member in self.inside.places for member in group) else self.between

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send by the way that leads there."""
        self._for((to,)).send(tensor, to, tag)

    def receive(self, num_bytes: int, source: int, tag: int) -> Pending:
        """Receive by the way that leads here."""
        return self._for((source,)).receive(num_bytes, source, tag)

    def all_reduce(self, flat: Tensor, group: Group) -> Pending:
        """Add up in place."""
        return self._for(group).all_reduce(flat, group)

    def all_to_all(self, sent: Tensor, lengths: list[int], got: Tensor, sizes: list[int], group: Group) -> Pending:
        """Exchange parts."""
        return self._for(group).all_to_all(sent, lengths, got, sizes, group)

    def all_gather_row(self, mine: Tensor, total: Tensor, group: Group) -> Pending:
        """Fill a row with the members' rows."""
        return self._for(group).all_gather_row(mine, total, group)

    def all_gather(self, tensor: Tensor, group: Group) -> Pending:
        """List every member's tensor."""
        return self._for(group).all_gather(tensor, group)

    def tell(self, row: Sequence[float], group: Group) -> Pending:
        """List every member's row of numbers."""
        return self._for(group).tell(row, group)

    def all_gather_object(self, value: Any, group: Group) -> Pending:
        """List every member's value."""
        return self._for(group).all_gather_object(value, group)

    def neighbours(self, group: Group) -> list[Group]:
        """Part a group by host."""
        parts = (tuple(member for member in group if member in host) for host in self.hosts)
        return [part for part in parts if part]

    def share(self, num_bytes: int, group: Group) -> Pending:
        """Share memory where the group is on one host."""
        return self._for(group).share(num_bytes, group)

    def meet(self, group: Group) -> Pending:
        """Wait for every member."""
        return self._for(group).meet(group)

    def flush(self) -> None:
        """Wait until everything is on its way."""
        self.inside.flush()
        self.between.flush()
