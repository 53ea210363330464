"""Which sample of which source is the g-th of the training run: pure functions of g.

    global index g --Mixture--> source, n-th sample drawn from it --> epoch = n // size, place n % size in that epoch
                                                          --KeyedPermutation(seed, source, epoch)--> position

Weights are met exactly in every block of BLOCK samples and within about one sample in any shorter run, because a
source's turns are spread evenly over the block. The same block pattern repeats, so a table of BLOCK entries serves any
number of samples. Turns need no randomness of their own: samples are shuffled within each source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.order import IntOrArray, KeyedPermutation

BLOCK = 100_000
"""Weights are rounded to this fraction; no source gets less than one sample a block."""


class Mixture:
    """Turns of several sources by weight, in O(1) memory.

    Args:
        weights: positive and finite; only their ratios count.
    """

    def __init__(self, weights: Sequence[float]):
        self.quotas = round_to_quotas(weights, BLOCK)
        times = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in self.quotas])
        turns = np.argsort(times, kind="stable")
        self._source_of_slot = np.repeat(np.arange(len(self.quotas)), self.quotas)[turns]
        self._rank_of_slot = np.concatenate([np.arange(quota) for quota in self.quotas])[turns]

    def draw(self, index: IntOrArray) -> tuple[IntOrArray, IntOrArray]:
        """The source of global sample `index`, and how many samples of that source came before it."""
        block, slot = index // BLOCK, index % BLOCK
        source = self._source_of_slot[slot]
        return source, block * self.quotas[source] + self._rank_of_slot[slot]


class ShuffledMixture:
    """Training order: sources by weight, each source's samples once an epoch, every epoch shuffled anew.

    Args:
        sizes: number of samples of each source.
        weights: share of each source.
        names: what the shuffles are keyed by, so that adding a source leaves the others' orders alone.
        seed: seed of all shuffles.
    """

    def __init__(self, *, sizes: Sequence[int], weights: Sequence[float], names: Sequence[str], seed: int):
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._mixture = Mixture(weights)
        self._names = tuple(names)
        self._seed = seed
        self._latest: dict[int, tuple[int, KeyedPermutation]] = {}

    def locate(self, index: int) -> tuple[int, int, int]:
        """(source, epoch, position) of a global sample."""
        source, number = (int(value) for value in self._mixture.draw(index))
        epoch, place = divmod(number, int(self._sizes[source]))
        return source, epoch, self._permutation(source, epoch)(place)

    def locate_range(self, start: int, stop: int) -> np.ndarray:
        """`locate` of start..stop-1 at once: int64 [stop - start, 3]."""
        sources, numbers = self._mixture.draw(np.arange(start, stop, dtype=np.int64))
        epochs, places = np.divmod(numbers, self._sizes[sources])
        positions = np.empty_like(places)
        for source, epoch in np.unique(np.stack([sources, epochs], axis=1), axis=0).tolist():
            chosen = (sources == source) & (epochs == epoch)
            positions[chosen] = self._permutation(source, epoch).many(places[chosen])
        return np.stack([sources, epochs, positions], axis=1)

    def _permutation(self, source: int, epoch: int) -> KeyedPermutation:
        cached = self._latest.get(source)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}/{self._names[source]}/{epoch}"
            cached = epoch, KeyedPermutation(int(self._sizes[source]), key)
            self._latest[source] = cached
        return cached[1]


class InTurn:
    """Validation order: every source from its start to its end, one after the other, then again.

    Args:
        sizes: number of samples of each source.
    """

    def __init__(self, *, sizes: Sequence[int]):
        self._stops = np.cumsum(np.asarray(sizes, dtype=np.int64))
        self._starts = self._stops - np.asarray(sizes, dtype=np.int64)

    def locate(self, index: int) -> tuple[int, int, int]:
        """(source, epoch, position) of a global sample."""
        epoch, place = divmod(index, int(self._stops[-1]))
        source = int(np.searchsorted(self._stops, place, side="right"))
        return source, epoch, place - int(self._starts[source])

    def locate_range(self, start: int, stop: int) -> np.ndarray:
        """`locate` of start..stop-1 at once: int64 [stop - start, 3]."""
        epochs, places = np.divmod(np.arange(start, stop, dtype=np.int64), self._stops[-1])
        sources = np.searchsorted(self._stops, places, side="right")
        return np.stack([sources, epochs, places - self._starts[sources]], axis=1)


def round_to_quotas(weights: Sequence[float], total: int) -> np.ndarray:
    """Integers in the ratio of `weights` that sum to `total`, each at least 1 (largest remainders are rounded up)."""
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    quotas = np.maximum(1, np.floor(shares)).astype(np.int64)
    missing = total - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - shares, kind="stable")[:missing]] += 1
    while missing < 0:
        quotas[np.argmax(quotas)] -= 1
        missing += 1
    return quotas
