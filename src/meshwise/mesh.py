"""Named axes and the arithmetic between a rank and its coordinate; nothing runs here.

::

    dp=2, pp=3        pp 0  1  2
                dp 0     0  1  2        rank = dp index * pp + pp index
                   1     3  4  5
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Place ``dp * pp`` ranks on two axes; neighbouring stages are neighbouring ranks."""

    dp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        """Count the ranks."""
        return self.dp * self.pp

    def rank(self, *, dp: int, pp: int) -> int:
        """Give the rank at a coordinate."""
        return dp * self.pp + pp

    def coordinate(self, rank: int) -> tuple[int, int]:
        """Give the (dp, pp) coordinate of a rank."""
        return divmod(rank, self.pp)

    def dp_group(self, pp: int) -> tuple[int, ...]:
        """List the ranks that hold the same stages, in the order of their data."""
        return tuple(self.rank(dp=i, pp=pp) for i in range(self.dp))

    def pp_group(self, dp: int) -> tuple[int, ...]:
        """List the ranks of one pipeline, first stage first."""
        return tuple(self.rank(dp=dp, pp=i) for i in range(self.pp))

    def stage_rank(self, stage: int, *, dp: int) -> int:
        """Give the rank of one replica that holds a stage (stages go round the pp axis)."""
        return self.rank(dp=dp, pp=stage % self.pp)
