"""The mesh of ranks: which rank does what, as pure arithmetic.

Ranks are numbered row-major over (pp, dp, cp, tp), tp fastest, which is the order of DeepSpeed's own topology. With
pp=2, dp=2, tp=2:

    stage 0: dp 0: [0 1]   dp 1: [2 3]
    stage 1: dp 0: [4 5]   dp 1: [6 7]        (each [..] is one tensor-parallel group)

Expert parallelism (ep) is no axis of its own: it divides the ranks that hold the same weights, every dp and cp of one
pp and tp, into groups that follow one another, and each rank of a group has other experts.

Nothing here needs torch or a process; `parallel.axes` turns a mesh into communication groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

AxisName = Literal["pp", "dp", "cp", "tp"]
AXIS_NAMES: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")


class Coords(NamedTuple):
    """The place of one rank on the mesh."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes, and how many replicas share the experts."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Of the dp x cp replicas, how many divide the experts among them."""

    def __post_init__(self) -> None:
        for axis in AXIS_NAMES:
            if self.size(axis) < 1:
                raise ValueError(f"mesh axis {axis}={self.size(axis)} must be at least 1")
        if self.ep < 1 or self.dp * self.cp % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp x cp = {self.dp} x {self.cp}")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: AxisName) -> int:
        """Number of ranks along one axis."""
        return getattr(self, axis)

    def coords(self, rank: int) -> Coords:
        """Place of a global rank."""
        self._check(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coords(pp, dp, cp, tp)

    def rank_at(self, coords: Coords) -> int:
        """Global rank of a place; the inverse of `coords`."""
        return ((coords.pp * self.dp + coords.dp) * self.cp + coords.cp) * self.tp + coords.tp

    def ranks_of(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Global ranks that differ from `rank` only along `axis`, itself included, in order of that axis."""
        here = self.coords(rank)
        return tuple(self.rank_at(here._replace(**{axis: index})) for index in range(self.size(axis)))

    def groups(self, *axes: AxisName) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ only along the given axes, in order of their first rank: together they hold every rank
        once."""
        found: dict[Coords, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(self.coords(rank)._replace(**dict.fromkeys(axes, 0)), []).append(rank)
        return tuple(sorted(map(tuple, found.values())))

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that have different experts of the same blocks: together they hold all, once."""
        groups = self.groups("dp", "cp")
        return tuple(ranks[at : at + self.ep] for ranks in groups for at in range(0, len(ranks), self.ep))

    def expert_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same experts."""
        return tuple(ranks[first :: self.ep] for ranks in self.groups("dp", "cp") for first in range(self.ep))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks")
