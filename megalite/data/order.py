"""A keyed permutation of [0, size): the shuffle of an epoch as a pure function, with nothing stored.

Shuffling by index array costs 8 bytes a sample and must be rebuilt, or shipped, on every restart. Here the place of a
sample follows from (key, index) alone: a Feistel network permutes the smallest power of two that holds `size`, and
values that land outside are sent through again until they fall inside (cycle walking; Black & Rogaway 2002, "Ciphers
with arbitrary finite domains"). The domain is less than twice `size`, so two passes are expected at most.

The trade-off: statistical shuffling, not cryptography, and about a microsecond a round in plain Python.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import xxhash

NUM_ROUNDS = 6
"""Four rounds make a Feistel network look random (Luby & Rackoff 1988) for ideal round functions; ours is cheap."""

MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""Odd 64-bit constants with well spread bits: the golden ratio, and Pelle Evensen's for xor-shift-multiply mixing."""

WORD = (1 << 64) - 1

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


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
        self._low_bits = num_bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (num_bits - self._low_bits)) - 1
        self._round_keys = [xxhash.xxh3_64_intdigest(f"{key}/{number}".encode()) for number in range(NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        value = self._permute_domain(index)
        while value >= self.size:
            value = self._permute_domain(value)
        return value

    def many(self, indices: np.ndarray) -> np.ndarray:
        """Where each of `indices` (integers, any shape) goes, as int64 of the same shape."""
        values = self._permute_domain(indices.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._permute_domain(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(indices.shape)

    def _permute_domain(self, value: IntOrArray) -> IntOrArray:
        """Permute the power of two around `size`; the same code serves Python ints and uint64 arrays."""
        high, low = value >> self._low_bits, value & self._low_mask
        for even, odd in zip(self._round_keys[::2], self._round_keys[1::2], strict=True):
            high = high ^ (_scramble(low, even) & self._high_mask)
            low = low ^ (_scramble(high, odd) & self._low_mask)
        return (high << self._low_bits) | low


def _scramble(half: IntOrArray, round_key: int) -> IntOrArray:
    """The round function: 32 well mixed bits. The mask makes Python ints wrap as uint64 does."""
    mixed = ((half ^ round_key) * MULTIPLIERS[0]) & WORD
    mixed = ((mixed ^ (mixed >> 32)) * MULTIPLIERS[1]) & WORD
    return mixed >> 32
