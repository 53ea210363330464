"""Runs of n words as 64-bit hashes, and a table of those that are wanted.

A word is a run of characters that are neither blanks nor punctuation nor symbols, in any script; ASCII letters count in
lower case. What lies between words counts for nothing: a copy with other quotes, dashes or blanks has the same words.

    The quick, BROWN fox jumps      n = 3
    the quick brown | quick brown fox | brown fox jumps

Imports numba at import; import it where the work begins.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megalite.corpus.rules.characters import ALPHANUMERIC, BLANK, PUNCTUATION, character_classes, decode
from megalite.corpus.spans.windows import BASE, mixed, power
from megalite.kernel import kernel

_WORD_BASE = np.uint64(0xD6E8FEB86659FD93)
_ZERO = np.uint64(0)

FILTER_BITS = 16
"""Bits of the filter for each wanted run: of the unwanted ones, at most 1 in 16 is looked up in the table itself."""


def list_ngrams(
    buffer: np.ndarray, offsets: np.ndarray, ngram: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every run of `ngram` words of each text.

    Args:
        buffer, offsets: the texts.
        ngram: words in a run.

    Returns:
        Hashes (uint64), first byte and byte behind the last (int64, in the text), and int64 [texts + 1]: the runs of
        text t are borders[t] to borders[t + 1].
    """
    return _list_ngrams(buffer, offsets, ngram, LOWER, between_words())


LOWER = np.array([ord(chr(byte).lower()) if byte < 128 else byte for byte in range(256)], np.uint8)
"""Of each byte, the one that a word counts."""


@lru_cache(maxsize=1)
def between_words() -> np.ndarray:
    """Whether each code point is between words, bool [0x110000]."""
    classes = character_classes()
    between = (classes & (BLANK | PUNCTUATION)) != 0
    between[:128] = (classes[:128] & ALPHANUMERIC) == 0  # control characters, too
    return between


@kernel
def _list_ngrams(
    buffer: np.ndarray, offsets: np.ndarray, ngram: int, lower: np.ndarray, between: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    most = (offsets[-1] - offsets[0]) // 2 + offsets.size
    hashes, starts, ends = np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int64)
    borders = np.zeros(offsets.size, np.int64)
    words, word_starts = np.zeros(ngram, np.uint64), np.zeros(ngram, np.int64)  # the latest words, in turn
    weight = power(ngram)
    found = 0
    for text in range(offsets.size - 1):
        begin, end = offsets[text], offsets[text + 1]
        words[:] = _ZERO
        run, num_words, slot = _ZERO, 0, 0
        place = begin
        while place < end:
            code, after = decode(buffer, place)
            if between[code]:
                place = after
                continue
            word, start = _ZERO, place
            while not between[code]:
                for at in range(place, after):
                    word = word * _WORD_BASE + np.uint64(lower[buffer[at]])
                place = after
                if place == end:
                    break
                code, after = decode(buffer, place)
            word = mixed(word)
            run = run * BASE + word - words[slot] * weight
            words[slot], word_starts[slot] = word, start - begin
            slot = slot + 1 if slot + 1 < ngram else 0
            num_words += 1
            if num_words >= ngram:
                hashes[found], starts[found], ends[found] = mixed(run), word_starts[slot], place - begin
                found += 1
        borders[text + 1] = found
    return hashes[:found], starts[:found], ends[:found], borders


@kernel
def build_table(hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An open-addressing table of hashes with the first owner of each, and a filter of bits before it.

    Args:
        hashes: uint64 [runs].
        owners: int32 [runs].

    Returns:
        Slots of hashes (uint64) and of owners (int32, -1 is free), and the filter (uint8).
    """
    num_slots = 64
    while num_slots < 2 * hashes.size:
        num_slots *= 2
    num_bits = num_slots * FILTER_BITS // 2
    slot_hashes, slot_owners = np.zeros(num_slots, np.uint64), np.full(num_slots, -1, np.int32)
    bits = np.zeros(num_bits // 8, np.uint8)
    for row in range(hashes.size):
        value = hashes[row]
        slot = _slot_of(slot_hashes, slot_owners, value)
        if slot_owners[slot] < 0:
            slot_hashes[slot], slot_owners[slot] = value, owners[row]
            bit = np.int64((value >> np.uint64(20)) & np.uint64(num_bits - 1))
            bits[bit >> 3] |= np.uint8(1 << (bit & 7))
    return slot_hashes, slot_owners, bits


@kernel
def look_up(hashes: np.ndarray, slot_hashes: np.ndarray, slot_owners: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The owner of each hash, int32 [runs]; -1 where it is not in the table."""
    owners = np.full(hashes.size, -1, np.int32)
    mask = np.uint64(8 * bits.size - 1)
    for row in range(hashes.size):
        value = hashes[row]
        bit = np.int64((value >> np.uint64(20)) & mask)
        if (bits[bit >> 3] >> (bit & 7)) & 1:
            owners[row] = slot_owners[_slot_of(slot_hashes, slot_owners, value)]
    return owners


@kernel
def _slot_of(slot_hashes: np.ndarray, slot_owners: np.ndarray, value: np.uint64) -> int:
    """The slot that holds a hash, or the free one where it belongs."""
    slot = np.int64(value & np.uint64(slot_owners.size - 1))
    while slot_owners[slot] >= 0 and slot_hashes[slot] != value:
        slot = (slot + 1) & (slot_owners.size - 1)
    return slot
