"""Hash tables from int64 to int64 for compiled code: open addressing in one array.

table   int64 [slots, 2]   key | value      a power of two of slots, at most half of them used
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel

EMPTY = -1
"""Key of an unused slot; keys are not negative."""

MIXER = 0x9E3779B97F4A7C15 - 2**64
"""2^64 / golden ratio, odd, as int64: multiplying by it spreads keys that differ in few bits (Knuth, vol. 3, 6.4)."""


def make_table(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A table of different keys.

    Args:
        keys: int64 [entries], not negative.
        values: int64 [entries], not negative.
    """
    slots = 16
    while slots < 2 * keys.size:
        slots *= 2
    table = np.full((slots, 2), EMPTY, np.int64)
    _fill(table, keys, values)
    return table


@bare_kernel
def _fill(table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    for entry in range(keys.size):
        slot = first_slot(keys[entry], table.shape[0])
        while table[slot, 0] != EMPTY:
            slot = (slot + 1) & (table.shape[0] - 1)
        table[slot, 0] = keys[entry]
        table[slot, 1] = values[entry]


@bare_kernel
def find(table: np.ndarray, key: int) -> int:
    """The value of a key, or -1."""
    slot = first_slot(key, table.shape[0])
    while table[slot, 0] != EMPTY:
        if table[slot, 0] == key:
            return table[slot, 1]
        slot = (slot + 1) & (table.shape[0] - 1)
    return EMPTY


@bare_kernel
def first_slot(key: int, num_slots: int) -> int:
    """Where the search for a key begins, in a table of a power of two of slots."""
    mixed = np.int64(key) * np.int64(MIXER)
    return ((mixed >> 32) ^ mixed >> 15) & (num_slots - 1)
