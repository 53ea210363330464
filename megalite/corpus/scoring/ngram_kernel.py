"""Looking up n-grams: one hash table for all orders, and the walk over a text.

The table is uint64 [slots, 2], 16 bytes an entry, four to a cache line:

    [ key | log probability, log backoff ]      the second word is two float32

The n-grams form a tree that is read from the last word backwards, and the slot of an entry is its name in it. So the
key of an n-gram is a pair of slots: exact, however long the n-gram is.

    of a word                  its hash, top bit set
    of left + suffix           (slot of the suffix + 1) << 32  |  slot of the word on its left

The longest n-gram with an entry holds the probability of its last word. The backoffs of the longer contexts are those
of the n-grams that end one word earlier:

    text            the  quiet  goon  eats         longest entry for "eats", with order 4: (goon eats)
    one earlier     (goon)  (quiet goon)  (the quiet goon)
    score           log p(eats | goon) + log b(quiet goon) + log b(the quiet goon)

Look-ups miss the processor's caches, and one word's depend on each other. So a block of words goes through the orders
side by side: first all single words, then all pairs, and so on, the first slot of each key read before any is judged.
Many misses are then under way at once.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.scoring.words import LINE_START, UNKNOWN
from megalite.kernel import kernel

EMPTY = np.uint64(0)

MAX_SLOTS = 1 << 30
"""A pair of slots fits in 63 bits, so it never equals the hash of a word."""

MISSING = -1
"""Slot of an n-gram without an entry."""

BLOCK = 1024
"""Words that are looked up side by side."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SLOT_BITS = np.uint64(32)


@kernel
def insert(table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Add entries to a table.

    Args:
        table: uint64 [slots, 2]; slots is a power of two, more than there will be entries.
        keys: uint64 [entries], distinct, new and not 0.
        values: float32 [entries, 2], log probability and log backoff.

    Returns:
        int64 [entries], the slot of each.
    """
    packed = values.view(np.uint64)
    slots = np.empty(keys.size, np.int64)
    for entry in range(keys.size):
        slot = _home(table, keys[entry])
        while table[slot, 0] != EMPTY:
            slot = (slot + 1) & (table.shape[0] - 1)
        table[slot, 0] = keys[entry]
        table[slot, 1] = packed[entry, 0]
        slots[entry] = slot
    return slots


@kernel
def pair_keys(suffix_slots: np.ndarray, left_slots: np.ndarray) -> np.ndarray:
    """Keys of n-grams of two words or more, uint64 [entries]."""
    keys = np.empty(suffix_slots.size, np.uint64)
    for entry in range(keys.size):
        keys[entry] = _pair_key(suffix_slots[entry], left_slots[entry])
    return keys


@kernel
def log_likelihoods(
    stream: np.ndarray, borders: np.ndarray, table: np.ndarray, order: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log probability of each text, and its number of words and line ends.

    Args:
        stream: uint64 [words], as `hash_words` makes it.
        borders: int64 [texts + 1], where in it each text begins.
        table: uint64 [slots, 2].
        order: longest n-gram in it.

    Returns:
        float64 [texts] in nats, int64 [texts].
    """
    total = np.zeros(borders.size - 1, np.float64)
    num_words = np.zeros(borders.size - 1, np.int64)
    slots = np.zeros(order + BLOCK, np.int64)
    backoffs = np.zeros((order - 1, 1 + BLOCK), np.float32)
    text = 0
    for begin in range(0, stream.size, BLOCK):
        block = stream[begin : begin + BLOCK]
        scores = _score_block(block, table, slots, backoffs)
        for index in range(block.size):
            while begin + index >= borders[text + 1]:
                text += 1
            if block[index] != LINE_START:
                total[text] += scores[index]
                num_words[text] += 1
        slots[:order] = slots[BLOCK:]
        backoffs[:, 0] = backoffs[:, BLOCK]
    return total, num_words


@kernel
def _score_block(block: np.ndarray, table: np.ndarray, slots: np.ndarray, backoffs: np.ndarray) -> np.ndarray:
    """Log probability of each word of a block, float64 [words].

    No n-gram is found that crosses the start of a line, since none was stored that does.

    Args:
        block: uint64 [words].
        table: uint64 [slots, 2].
        slots: int64 [order + BLOCK], slot of each word behind those of the last words before; filled in here.
        backoffs: float32 [order - 1, 1 + BLOCK], log backoff of the n-gram of k + 1 words that ends at each word, or 0
            where there is no such entry, behind those of the word before; filled in here.
    """
    values = table.view(np.float32)  # [slots, 4]: 2 is the log probability, 3 the log backoff
    order, num_words = backoffs.shape[0] + 1, block.size
    backoffs[:, 1:] = 0.0
    active = np.arange(num_words)  # words whose n-gram of the present length has an entry
    nodes = np.empty(num_words, np.int64)  # its slot
    longest, scores = np.zeros(num_words, np.int64), np.empty(num_words, np.float64)
    unknown = _search(table, UNKNOWN, _home(table, UNKNOWN))
    for length in range(order):
        keys = block
        if length > 0:
            keys = np.empty(active.size, np.uint64)
            for place, index in enumerate(active):
                keys[place] = _pair_key(nodes[index], slots[order + index - length])
        matches = _find_all(table, keys)
        num_active = 0
        for place, index in enumerate(active):
            slot = matches[place]
            if length == 0:
                slot = slot if slot != MISSING else unknown
                slots[order + index] = slot
            if slot != MISSING:
                nodes[index], longest[index], scores[index] = slot, length, values[slot, 2]
                if length < order - 1:
                    backoffs[length, 1 + index] = values[slot, 3]
                active[num_active] = index
                num_active += 1
        active = active[:num_active]
    for length in range(order - 1):
        for word in range(num_words):
            scores[word] += backoffs[length, word] if length >= longest[word] else 0.0
    return scores


@kernel
def _find_all(table: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The slot of each key or MISSING, int64 [keys]."""
    slots = np.empty(keys.size, np.int64)
    seen = np.empty(keys.size, np.uint64)
    for index in range(keys.size):
        slots[index] = _home(table, keys[index])
        seen[index] = table[slots[index], 0]
    for index in range(keys.size):
        if seen[index] != keys[index]:
            slots[index] = MISSING if seen[index] == EMPTY else _search(table, keys[index], slots[index])
    return slots


@kernel
def _search(table: np.ndarray, key: np.uint64, slot: int) -> int:
    """The slot of a key, from its home on, or MISSING."""
    while table[slot, 0] != key:
        if table[slot, 0] == EMPTY:
            return MISSING
        slot = (slot + 1) & (table.shape[0] - 1)
    return slot


@kernel
def _pair_key(suffix_slot: int, left_slot: int) -> np.uint64:
    return (np.uint64(suffix_slot + 1) << _SLOT_BITS) | np.uint64(left_slot)


@kernel
def _home(table: np.ndarray, key: np.uint64) -> int:
    """Where the search for a key begins: the middle bits of a product (Knuth's multiplicative hashing)."""
    product = key * _GOLDEN
    return np.int64((product ^ (product >> _SLOT_BITS)) & np.uint64(table.shape[0] - 1))
