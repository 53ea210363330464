"""Whether the weights that several ranks hold are still the same on all of them, to the last bit.

    every weight               over dp, where ZeRO does not cut it (stages 0 to 2), or over groups of replicas
    norms, row biases, ...     over tp as well: what tensor parallelism leaves whole
    an embedding               on the first and on the last stage of a pipeline, tied or for further predictions

Copies drift when a gradient is not summed, a collective is lost or a memory cell flips, and nothing shows it until the
loss does; BLOOM's norms drifted apart over tp unseen (its training chronicles). Each weight becomes one 64-bit number,
and one reduction of the largest and the smallest over each axis tells whether all are equal. Only when they are not do
ranks exchange what they have, so that the ones in the minority can be named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.plan import needs_embedding_at_head
from megalite.engine.protocol import Engine, HeldWeight
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes, Axis
from megalite.parallel.collectives import all_reduce, any_rank, from_all

PRIME = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, so that multiplying with it loses nothing; the golden ratio's, as in `data.order`."""

WORDS_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Of a tensor that is hashed: what stays in a core's cache, and what keeps a GPU busy, with 64 MB on the way."""

AT_ENDS = "embedding.weight"
"""Of which the last stage may have a copy, by this name or as its head."""


@dataclass(frozen=True)
class Drift:
    """A weight whose copies differ."""

    name: str
    """Of the parameter."""
    ranks: tuple[int, ...]
    """Global ranks whose copy is not what most others have; all holders when no value has a majority."""
    holders: tuple[int, ...]

    def __str__(self) -> str:
        if self.ranks == self.holders:
            return f"{self.name} differs between ranks {_listed(self.holders)}"
        others = [rank for rank in self.holders if rank not in self.ranks]
        return f"{self.name} on rank {_listed(self.ranks)} differs from ranks {_listed(others)}"


class Replicas:
    """The weights of a stage that other ranks hold too. Made on all ranks together."""

    def __init__(self, engine: Engine, axes: Axes):
        self._engine, self._axes = engine, axes
        self._at_ends = _held_at_ends(engine.stage, axes)

    def find_drift(self) -> list[Drift]:
        """Compare now. Collective; returns the same on all ranks, empty when every copy is equal."""
        held = self._engine.held_weights()
        hashes = {weight.name: hash_tensor(weight.tensor) for weight in held}
        differs = not self._ends_are_equal(hashes)
        for axis in dict.fromkeys(axis for weight in held for axis in weight.copied_over):
            differs |= not _all_equal([hashes[weight.name] for weight in held if axis in weight.copied_over], axis)
        device = next(iter(hashes.values())).device
        return self._name_them(held, hashes) if any_rank(differs, self._axes.world, device) else []

    def _ends_are_equal(self, hashes: dict[str, Tensor]) -> bool:
        if self._at_ends is None:
            return True
        mine = hashes.get(self._at_ends)  # stages in the middle have no copy, and no say
        low = next(iter(hashes.values())).new_full((), torch.iinfo(torch.int64).min)
        bounds = torch.stack([low, low] if mine is None else [mine, ~mine])
        bounds = all_reduce(bounds, self._axes.pp, dist.ReduceOp.MAX)
        return bool(bounds[0] == ~bounds[1])

    def _name_them(self, held: list[HeldWeight], hashes: dict[str, Tensor]) -> list[Drift]:
        """Every rank tells every other what it has: only after a drift, so what it costs does not matter."""
        axes = self._axes
        mine: dict[tuple, int] = {}
        for weight in held:
            name, stage = (AT_ENDS, -1) if weight.name == self._at_ends else (weight.name, axes.pp.rank)
            mine[(name, stage, _place(weight, axes))] = int(hashes[weight.name].item())
        return list(find_odd_ones(from_all(mine, axes.world)))


def _place(weight: HeldWeight, axes: Axes) -> tuple[int, int]:
    """Which part of a weight, or of its experts, a rank holds."""
    over_tp = 0 if axes.tp in weight.copied_over else axes.tp.rank
    copies = next((axis.global_ranks for axis in weight.copied_over if axis.size > 1 and axis != axes.tp), None)
    first = axes.global_rank if copies is None else copies[0]
    return over_tp, axes.replicas.global_ranks.index(first)


def find_odd_ones(copies: list[dict[tuple, int]]) -> Iterator[Drift]:
    """The weights whose copies differ.

    Args:
        copies: for each rank, the hash of each part of a weight that it holds; the first of a key is its name.
    """
    for key in sorted({key for mine in copies for key in mine}, key=str):
        held = {rank: mine[key] for rank, mine in enumerate(copies) if key in mine}
        counts = Counter(held.values()).most_common(2)
        if len(counts) == 1:
            continue
        has_majority = counts[0][1] > counts[1][1]
        odd = tuple(rank for rank, value in held.items() if not has_majority or value != counts[0][0])
        yield Drift(key[0], odd, tuple(held))


@torch.no_grad()
def hash_tensor(tensor: Tensor) -> Tensor:
    """A 64-bit number of a tensor's bits: scalar int64, on its device. One changed bit always changes it."""
    flat = tensor.detach().contiguous().flatten()
    words = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    at_once = max(1, min(words.numel(), WORDS_AT_ONCE[words.device.type]))
    factors = torch.arange(1, 2 * at_once, 2, device=words.device) * PRIME  # odd: no bit is lost
    total, step = factors.new_zeros(()), factors.new_full((), 2) * PRIME
    for start in range(0, words.numel(), at_once):
        part = words[start : start + at_once]
        total += (part * factors[: part.numel()]).sum() + part.sum() * (start * step)  # word i times (2 i + 1) primes
    return total


def _all_equal(hashes: list[Tensor], axis: Axis) -> bool:
    """Whether each number is the same along an axis. Collective."""
    if axis.size == 1 or not hashes:
        return True
    mine = torch.stack(hashes)
    largest = all_reduce(torch.cat([mine, ~mine]), axis, dist.ReduceOp.MAX)  # ~ turns the order around
    return torch.equal(largest[: len(hashes)], ~largest[len(hashes) :])


def _held_at_ends(stage: Stage, axes: Axes) -> str | None:
    """This rank's name of what first and last stage share; empty on stages between; None when there is none."""
    if not needs_embedding_at_head(stage.spec.model) or axes.pp.size == 1:
        return None
    if stage.embedding is not None:
        return AT_ENDS
    return "head.weight" if stage.spec.has_head else ""


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
