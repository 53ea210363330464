"""A vocabulary as arrays for compiled code, and the hash tables that the three algorithms search in it.

A table maps int64 to int64 by open addressing in one array:

    int64 [slots, 2]   key | value      a power of two of slots, at most half of them used
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


BPE, UNIGRAM, BYTE_BPE = range(3)

JOIN, CUT, HARD = range(3)
"""Of two bytes: no word ends between them, one does, or it takes more than them to know."""

NO_PIECE = -1


class VocabularyArrays(NamedTuple):
    """Arrays that an algorithm does not need are empty."""

    algorithm: int
    """BPE or UNIGRAM of SentencePiece, or BYTE_BPE."""
    rules: np.ndarray
    """uint8 [65536]: JOIN, CUT or HARD at 256 * a + b for byte a before byte b; see `cuts.py` and `byte_level.py`."""
    classes: np.ndarray
    """BYTE_BPE: uint8 [code points]: where the HARD words end."""
    byte_ids: np.ndarray
    """int32 [256]: the pieces of single bytes."""
    char_ids: np.ndarray
    """BPE: int32 [code points]: the piece of a single character, or NO_PIECE. A blank has that of U+2581."""
    merges: np.ndarray
    """BPE, BYTE_BPE: table of left id << 32 | right id -> rank << 32 | id of both together."""
    edges: np.ndarray
    """UNIGRAM: table of node << 8 | byte -> node of a trie over the pieces. A blank leads where U+2581 does."""
    piece_at: np.ndarray
    """UNIGRAM: int32 [nodes]: the piece that ends there, or NO_PIECE."""
    scores: np.ndarray
    """UNIGRAM: int64 [vocab], in units of SCORE_STEP."""
    unknown_score: int
    """UNIGRAM: that of a character without a piece."""


def make_pieces(algorithm: int, rules: np.ndarray, byte_ids: np.ndarray, **arrays: Any) -> VocabularyArrays:
    """Pieces, with empty arrays for what is not given."""
    no_table = make_table(*np.zeros((2, 0), np.int64))
    without = VocabularyArrays(
        algorithm=algorithm,
        rules=rules,
        classes=np.zeros(0, np.uint8),
        byte_ids=byte_ids.astype(np.int32),
        char_ids=np.zeros(0, np.int32),
        merges=no_table,
        edges=no_table,
        piece_at=np.zeros(0, np.int32),
        scores=np.zeros(0, np.int64),
        unknown_score=0,
    )
    return without._replace(**arrays)
