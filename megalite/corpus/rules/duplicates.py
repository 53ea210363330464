"""Which keys came before: one small hash table, used again and again without being cleared.

    slots   [ generation << 32 | index of the key's first occurrence ]      a power of two

An entry counts only when its generation is the table's present one, so a new use is a step of the generation and not a
sweep over memory. Each use takes only as many slots from the front as its keys need: those of a small document stay in
the processor's nearest cache. (A table for a whole batch misses the cache at every key, which costs ten times as much.)

Keys are 64-bit hashes of texts and stand for them: two different texts of one document share a key once in about
10**19 / documents**2 cases.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.kernel import bare_kernel

SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio (Knuth, vol. 3, 6.4): its product's upper bits are spread evenly."""

INDEX_MASK = np.int64(0xFFFFFFFF)


class HashTable(NamedTuple):
    """Slots, and the generation in an array of one."""

    slots: np.ndarray
    generation: np.ndarray


def make_table(most_keys: int) -> HashTable:
    """A table for up to so many keys at once. Memory is taken from the system only where it is touched."""
    return HashTable(np.zeros(1 << (2 * max(most_keys, 1) - 1).bit_length(), np.int64), np.zeros(1, np.int64))


@bare_kernel
def start_use(table: HashTable, num_keys: int) -> tuple[int, np.uint64]:
    """Begin anew, for at most num_keys keys; returns the generation and the shift that `find_first` wants."""
    table.generation[0] += 1
    bits = 1
    while (1 << bits) < 2 * num_keys:
        bits += 1
    return table.generation[0], np.uint64(64 - bits)


@bare_kernel
def find_first(slots: np.ndarray, generation: int, shift: np.uint64, keys: np.ndarray, index: int) -> int:
    """The index of the first of keys[: index + 1] that equals keys[index]; earlier ones have been asked for before."""
    key = keys[index]
    mask = (np.int64(1) << np.int64(np.uint64(64) - shift)) - 1
    slot = np.int64((key * SPREAD) >> shift)
    while True:
        entry = slots[slot]
        if entry >> 32 != generation:
            slots[slot] = generation << 32 | index
            return index
        first = entry & INDEX_MASK
        if keys[first] == key:
            return first
        slot = (slot + 1) & mask


@bare_kernel
def count_duplicates(keys: np.ndarray, num_chars: np.ndarray, num_keys: int, table: HashTable) -> tuple[int, int]:
    """How many keys equal an earlier one, and how many characters these have."""
    generation, shift = start_use(table, num_keys)
    duplicates, duplicate_chars = 0, 0
    for index in range(num_keys):
        if find_first(table.slots, generation, shift, keys, index) != index:
            duplicates += 1
            duplicate_chars += num_chars[index]
    return duplicates, duplicate_chars
