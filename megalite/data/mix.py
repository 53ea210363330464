"""Which sample of which source is the g-th of the training run: pure functions of g.

    global index g --Mixture--> source, n-th sample drawn from it --> epoch = n // size, place n % size in that epoch
                                                          --KeyedPermutation(seed, source, epoch)--> position

Weights are met exactly in every block of BLOCK samples. The same block pattern repeats, so a table of BLOCK entries
serves any number of samples. Where that would round a small share by more than a thousandth, blocks differ: each gives
what is due by then, so that weights are met exactly in every CYCLE of them, and what repeats is the cycle. Turns need
no randomness of their own: samples are shuffled within each source. Inside a block, two patterns:

    spread   a source's turns lie evenly in the block. Where many sources have equal weights their turns coincide and
             follow each other in a row, so a heavy one beside them may run some samples late (weight x sources / 2).
             It is the order of every mixture without stages, and stays so that old runs can go on
    exact    no source is ever a whole sample early or late: turn k of a source of share w lies in
             [(k - 1) / w, k / w), rounded outward, and of the turns that may come now the one that must come first
             does (Baruah et al. 1996, "Proportionate progress"). It is the order inside stages

Stages change the weights at given samples. What a source has given in earlier stages is counted once, when the order is
made, so a sample of any stage is found as fast as one of the first, and an epoch runs on through the border.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megalite.data.order import IntOrArray, KeyedPermutation, permute_each
from megalite.data.ranking import RankedOrder

BLOCK = 100_000
CYCLE = 1000
"""Blocks in which weights are met where one is too short. No source gets less than one sample of them."""
ROUNDED_BY = 1e-3
"""Of a source's share, at most, by which blocks that are all alike may be off."""


Pattern = Literal["spread", "exact"]


class MixStage(NamedTuple):
    """A stretch of the run with weights of its own."""

    stop: int | None
    """Global sample at which the next stage begins; None for the last one, which has no end."""
    weights: tuple[float, ...]
    """Of each source; 0 leaves it out of this stage."""


class Mixture:
    """Turns of several sources by weight, in O(1) memory.

    Args:
        weights: finite and not negative, at least one positive; only their ratios count.
        pattern: order of the turns inside a block.
    """

    stops: tuple[int, ...] = ()
    """Global samples at which the weights change."""

    def __init__(self, weights: Sequence[float], pattern: Pattern = "spread"):
        self.quotas = quotas_of_blocks(weights)
        """Samples of each source in each block of a cycle, int64 [blocks, sources]."""
        self._before = np.cumsum([np.zeros_like(self.quotas[0]), *self.quotas], axis=0)
        self._turns_of = _spread_turns if pattern == "spread" else _exact_turns
        self._latest: tuple[bytes, _Turns] | None = None

    def draw(self, index: IntOrArray) -> tuple[IntOrArray, IntOrArray]:
        """The source of global sample `index`, and how many samples of that source came before it."""
        if not isinstance(index, np.ndarray):
            return self._draw_of_block(index // BLOCK, index % BLOCK)
        blocks = index // BLOCK
        sources, numbers = np.empty_like(index), np.empty_like(index)
        for kind in np.unique(blocks % len(self.quotas)).tolist():  # all of the same turns
            chosen = blocks % len(self.quotas) == kind
            sources[chosen], numbers[chosen] = self._draw_of_block(blocks[chosen], index[chosen] % BLOCK)
        return sources, numbers

    def count(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` each source gives, int64 [sources]."""
        blocks, slots = divmod(num_samples, BLOCK)
        cycles, block = divmod(blocks, len(self.quotas))
        whole = cycles * self._before[-1] + self._before[block]
        return whole + np.bincount(self._turns(block).source_of_slot[:slots], minlength=whole.size)

    def _draw_of_block(self, block: IntOrArray, slot: IntOrArray) -> tuple[IntOrArray, IntOrArray]:
        """`draw` of blocks, all of which have the same turns."""
        cycle, kind = block // len(self.quotas), int(np.max(block % len(self.quotas)))
        turns = self._turns(kind)
        source = turns.source_of_slot[slot]
        return source, cycle * self._before[-1][source] + self._before[kind][source] + turns.rank_of_slot[slot]

    def _turns(self, block: int) -> _Turns:
        """Those of a block of the cycle, kept until a block has others."""
        key = self.quotas[block].tobytes()
        if self._latest is None or self._latest[0] != key:
            self._latest = key, _Turns(self.quotas[block], self._turns_of(self.quotas[block]))
        return self._latest[1]


class _Turns:
    """The slots of one block.

    Args:
        quotas: of each source.
        source_of_slot: which source each turn is.
    """

    def __init__(self, quotas: np.ndarray, source_of_slot: np.ndarray):
        self.source_of_slot = source_of_slot
        order = np.argsort(source_of_slot, kind="stable")
        self.rank_of_slot = np.empty(BLOCK, np.int64)
        """How many turns of its source are before each."""
        self.rank_of_slot[order] = np.arange(BLOCK) - np.repeat(np.cumsum(quotas) - quotas, quotas)


class StagedMixture:
    """Mixtures one after the other, addressed as one.

    Args:
        stages: at least one; their stops grow, and only the last is None.
    """

    def __init__(self, stages: Sequence[MixStage]):
        stops = [stage.stop for stage in stages if stage.stop is not None]
        assert stages[-1].stop is None, stages
        assert len(stops) == len(stages) - 1, stages
        assert all(start < stop for start, stop in zip([0, *stops], stops, strict=False)), stages
        self._mixtures = [Mixture(stage.weights, "exact") for stage in stages]
        self.stops = tuple(stops)
        self._starts = np.array([0, *stops], np.int64)
        lengths = np.diff(self._starts).tolist()
        counts = [mixture.count(length) for mixture, length in zip(self._mixtures, lengths, strict=False)]
        self._before = np.cumsum([np.zeros(len(stages[0].weights), np.int64), *counts], axis=0)

    def draw(self, index: IntOrArray) -> tuple[IntOrArray, IntOrArray]:
        """The source of global sample `index`, and how many samples of that source came before it."""
        if isinstance(index, np.ndarray):
            return self._draw_many(index)
        stage = int(np.searchsorted(self._starts, index, side="right")) - 1
        source, number = self._mixtures[stage].draw(index - int(self._starts[stage]))
        return source, self._before[stage, source] + number

    def count(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` each source gives, int64 [sources]."""
        stage = max(0, int(np.searchsorted(self._starts, num_samples, side="left")) - 1)
        return self._before[stage] + self._mixtures[stage].count(num_samples - int(self._starts[stage]))

    def _draw_many(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        stages = np.searchsorted(self._starts, indices, side="right") - 1
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        for stage in np.unique(stages).tolist():
            chosen = stages == stage
            sources[chosen], drawn = self._mixtures[stage].draw(indices[chosen] - self._starts[stage])
            numbers[chosen] = self._before[stage, sources[chosen]] + drawn
        return sources, numbers


class ShuffledMixture:
    """Training order: sources by weight, each source's samples once an epoch, every epoch shuffled anew.

    Args:
        sizes: number of samples of each source.
        weights: share of each source.
        names: what the shuffles are keyed by, so that adding a source leaves the others' orders alone.
        seed: seed of all shuffles.
        stages: weights that change during the run, in place of `weights`; empty for none.
        ranks: sources, by number, whose samples come in an order of their own: int64 [size] each.
        num_stretches: of such an order; samples are shuffled within each.

    `shift` moves each source's count of samples drawn, int64 [sources]: see `data.cursor`.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        weights: Sequence[float],
        names: Sequence[str],
        seed: int,
        stages: Sequence[MixStage] = (),
        ranks: Mapping[int, np.ndarray] | None = None,
        num_stretches: int = 1,
    ):
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self.mixture = self._whole = StagedMixture(stages) if stages else Mixture(weights)
        self._names = tuple(names)
        self._seed = seed
        self._ranks = ranks or {}
        self._num_stretches = num_stretches
        self.shift = np.zeros(self._sizes.size, np.int64)
        self._latest: dict[int, tuple[int, KeyedPermutation | RankedOrder]] = {}

    def moved(self, shift: Sequence[int], rest: Sequence[MixStage]) -> ShuffledMixture:
        """The order of a run whose mixture has changed: with this shift, and with stages for what is left of it, empty
        for those of the whole."""
        other = copy.copy(self)
        other.shift = np.array(shift, np.int64)
        other.mixture = StagedMixture(rest) if rest else self._whole
        return other

    def locate(self, index: int) -> tuple[int, int, int]:
        """(source, epoch, position) of a global sample."""
        source, number = (int(value) for value in self.mixture.draw(index))
        epoch, place = divmod(number + int(self.shift[source]), int(self._sizes[source]))
        return source, epoch, self._permutation(source, epoch)(place)

    def locate_many(self, indices: np.ndarray) -> np.ndarray:
        """`locate` of int64 [n] indices at once: int64 [n, 3]."""
        if indices.size == 0:
            return np.empty((0, 3), np.int64)
        num_sources = self._sizes.size
        sources, numbers = self.mixture.draw(indices)
        epochs, places = np.divmod(numbers + self.shift[sources], self._sizes[sources])
        passes, which = np.unique(epochs * num_sources + sources, return_inverse=True)
        orders = [self._permutation(number % num_sources, number // num_sources) for number in passes.tolist()]
        keyed = [order for order in orders if isinstance(order, KeyedPermutation)]
        if len(keyed) == len(orders):  # none has an order of its own
            return np.stack([sources, epochs, permute_each(keyed, which, places)], axis=1)
        positions = np.empty_like(places)
        for number, order in enumerate(orders):
            positions[which == number] = order.many(places[which == number])
        return np.stack([sources, epochs, positions], axis=1)

    def locate_range(self, start: int, stop: int) -> np.ndarray:
        """`locate` of start..stop-1 at once: int64 [stop - start, 3]."""
        return self.locate_many(np.arange(start, stop, dtype=np.int64))

    def _permutation(self, source: int, epoch: int) -> KeyedPermutation | RankedOrder:
        cached = self._latest.get(source)
        if cached is None or cached[0] != epoch:
            key = f"{self._seed}/{self._names[source]}/{epoch}"
            ranks = self._ranks.get(source)
            if ranks is None:
                cached = epoch, KeyedPermutation(int(self._sizes[source]), key)
            else:
                cached = epoch, RankedOrder(ranks, key, self._num_stretches)
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

    def locate_many(self, indices: np.ndarray) -> np.ndarray:
        """`locate` of int64 [n] indices at once: int64 [n, 3]."""
        epochs, places = np.divmod(indices, self._stops[-1])
        sources = np.searchsorted(self._stops, places, side="right")
        return np.stack([sources, epochs, places - self._starts[sources]], axis=1)

    def locate_range(self, start: int, stop: int) -> np.ndarray:
        """`locate` of start..stop-1 at once: int64 [stop - start, 3]."""
        return self.locate_many(np.arange(start, stop, dtype=np.int64))


def quotas_of_blocks(weights: Sequence[float]) -> np.ndarray:
    """Samples of each source in each block of a cycle, int64 [blocks, sources]: of one block where that is as good."""
    quotas = round_to_quotas(weights, BLOCK)
    shares = np.asarray(weights, np.float64) / np.sum(weights) * BLOCK
    if np.all(np.abs(quotas - shares) <= ROUNDED_BY * shares):
        return quotas[None]
    of_cycle, blocks, largest = round_to_quotas(weights, CYCLE * BLOCK), np.arange(CYCLE + 1), int(np.argmax(shares))
    phases = np.arange(shares.size) * CYCLE  # so that equal sources do not all give one more in the same block
    before = (blocks[:, None] * of_cycle * shares.size + phases) // (CYCLE * shares.size)
    before[:, largest] += BLOCK * blocks - before.sum(axis=1)  # it takes what the others leave
    found = np.diff(before, axis=0)
    return quotas[None] if found.min() < 0 else found


def round_to_quotas(weights: Sequence[float], total: int) -> np.ndarray:
    """Integers in the ratio of `weights` that sum to `total` (largest remainders are rounded up).

    A positive weight gets 1 at least, and 0 gets none.
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    quotas = np.maximum(shares > 0, np.floor(shares)).astype(np.int64)
    missing = total - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - shares, kind="stable")[:missing]] += 1
    while missing < 0:
        quotas[np.argmax(quotas)] -= 1
        missing += 1
    return quotas


def _spread_turns(quotas: np.ndarray) -> np.ndarray:
    """The source of each turn of a block: turn k of a source stands at (k + 1/2) / quota of the block."""
    times = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas.tolist()])
    return np.repeat(np.arange(quotas.size), quotas)[np.argsort(times, kind="stable")]


def _exact_turns(quotas: np.ndarray) -> np.ndarray:
    """The source of each turn of a block: among the turns that may come, the one with the earliest deadline.

    Such a schedule exists because the shares sum to one, and on one machine earliest-deadline-first finds it.
    """
    total = int(quotas.sum())
    coming = [(0, source) for source, quota in enumerate(quotas.tolist()) if quota]  # (turn from which it may come, ..)
    waiting: list[tuple[int, int]] = []  # (turn before which it must come, source)
    given = [0] * quotas.size
    quota_of = quotas.tolist()
    turns = np.empty(total, np.int64)
    for turn in range(total):
        while coming and coming[0][0] <= turn:
            _, source = heapq.heappop(coming)
            deadline = -(-(given[source] + 1) * total // quota_of[source])
            heapq.heappush(waiting, (deadline, source))
        deadline, source = heapq.heappop(waiting)
        assert turn < deadline, (turn, deadline, source)
        turns[turn] = source
        given[source] += 1
        if given[source] < quota_of[source]:
            heapq.heappush(coming, (given[source] * total // quota_of[source], source))
    return turns
