"""A keyed permutation of [0, size): the shuffle of an epoch as a pure function, with nothing stored.

Shuffling by index array costs 8 bytes a sample and must be rebuilt, or shipped, on every restart. Here the place of a
sample follows from (key, index) alone: a Feistel network permutes the smallest power of two that holds `size`, and
values that land outside are sent through again until they fall inside (cycle walking; Black & Rogaway 2002, "Ciphers
with arbitrary finite domains"). The domain is less than twice `size`, so two passes are expected at most.

The trade-off: statistical shuffling, not cryptography, and about a microsecond a round in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import xxhash

NUM_ROUNDS = 6
"""Four rounds make a Feistel network look random (Luby & Rackoff 1988) for ideal round functions; ours is cheap."""

MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""Odd 64-bit constants with well spread bits: the golden ratio, and Pelle Evensen's for xor-shift-multiply mixing."""

WORD = (1 << 64) - 1

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


@dataclass(frozen=True)
class Network(Generic[IntOrArray]):
    """A Feistel network over the numbers of a few bits: ints, or uint64 [n] where every number has its own."""

    low_bits: IntOrArray
    low_mask: IntOrArray
    high_mask: IntOrArray
    round_keys: list[IntOrArray]
    """NUM_ROUNDS of them."""


class KeyedPermutation:
    """A bijection of [0, size) chosen by `key`.

    Args:
        size: number of elements, at least 1 and at most 2**62.
        key: any text; two keys give unrelated permutations.
    """

    def __init__(self, size: int, key: str):
        assert 1 <= size <= 1 << 62, size
        num_bits = max(2, (size - 1).bit_length())
        self.size = size
        round_keys = [xxhash.xxh3_64_intdigest(f"{key}/{number}".encode()) for number in range(NUM_ROUNDS)]
        low, high = num_bits // 2, num_bits - num_bits // 2
        self.network = Network(low, (1 << low) - 1, (1 << high) - 1, round_keys)

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        value = _permute(index, self.network)
        while value >= self.size:
            value = _permute(value, self.network)
        return value

    def many(self, indices: np.ndarray) -> np.ndarray:
        """Where each of `indices` (integers, any shape) goes, as int64 of the same shape."""
        return permute_each([self], np.zeros(indices.size, np.int64), indices.ravel()).reshape(indices.shape)


def permute_each(permutations: Sequence[KeyedPermutation], which: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Where each index goes in a permutation of its own; as fast for hundreds of permutations as for one.

    Args:
        permutations: at least one.
        which: int64 [n] number of the permutation of each index.
        indices: int64 [n].

    Returns:
        int64 [n].
    """
    sizes = np.array([each.size for each in permutations], np.uint64)[which]
    networks = [each.network for each in permutations]
    bits = np.array([network.low_bits for network in networks], np.uint64)[which]
    lows = np.array([network.low_mask for network in networks], np.uint64)[which]
    highs = np.array([network.high_mask for network in networks], np.uint64)[which]
    keys = np.array([network.round_keys for network in networks], np.uint64)[which].T
    values = _permute(indices.astype(np.uint64), Network(bits, lows, highs, list(keys)))
    outside = np.flatnonzero(values >= sizes)
    while outside.size:
        own = Network(bits[outside], lows[outside], highs[outside], list(keys[:, outside]))
        values[outside] = _permute(values[outside], own)
        outside = outside[values[outside] >= sizes[outside]]
    return values.astype(np.int64)


def _permute(value: IntOrArray, network: Network[IntOrArray]) -> IntOrArray:
    """Permute a power of two; the same code serves Python ints and uint64 arrays."""
    high, low = value >> network.low_bits, value & network.low_mask
    for even, odd in zip(network.round_keys[::2], network.round_keys[1::2], strict=True):
        high = high ^ (_scramble(low, even) & network.high_mask)
        low = low ^ (_scramble(high, odd) & network.low_mask)
    return (high << network.low_bits) | low


def _scramble(half: IntOrArray, round_key: IntOrArray) -> IntOrArray:
    """The round function: 32 well mixed bits. The mask makes Python ints wrap as uint64 does."""
    mixed = ((half ^ round_key) * MULTIPLIERS[0]) & WORD
    mixed = ((mixed ^ (mixed >> 32)) * MULTIPLIERS[1]) & WORD
    return mixed >> 32
