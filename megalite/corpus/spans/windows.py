"""Which passages of a corpus repeat: exactly, in time linear in the text, with an index far smaller than the text.

A *window* is min_bytes consecutive bytes of a document; a document of n bytes has n - min_bytes + 1. A passage of at
least min_bytes repeats exactly when all its windows do, so it is enough to find, for each window, whether an equal one
stood earlier. To index every window would cost 16 bytes and a cache miss for each byte of text. Instead windows are
sorted into groups by a *key* which is a function of their bytes, the smallest hash of the blocks they hold:

    text        t h e _ q u i c k _ b r o w n _ f o x ...        blocks here 4 bytes, windows 7
    block hash  61  40  87 12 93 55 70 31 88 ...                 of the block that begins here
    key         12 12 12 12 31 31 ...                            smallest of the min_bytes - block_bytes + 1 hashes
    run         [12: 4 windows][31: ...                          consecutive windows with the same key

- Equal windows have equal keys, so they meet in one group; the groups need no other contact and can be compared one
  after the other, in any order and on any machine.
- A smallest value stays the smallest while its block is inside the window, so neighbours share their keys: one entry
  for a run of about min_bytes / 4 windows (minimizers, Roberts et al. 2004; runs are their super-k-mers).
- Most groups are a single run, and are done. In the others the windows are compared byte for byte (`repeats.py`).

The price is that the text is read twice, and repeated text about five times over in pieces. A suffix array finds the
same passages, with some 10 bytes of memory for each byte of text and all of the text in one memory.

A hash decides only who is compared with whom, never what repeats: the result does not depend on it. In periodic text
(blanks, dashes) the smallest hash comes back again and again and the run goes on, so it is one entry too.

Imports numba at import; import it where the work begins.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import kernel
from megalite.texts import Texts

RUN = np.dtype([("key", np.uint64), ("first", np.int64), ("count", np.int32)])
"""Windows that follow each other and have one key: the place of the first, and how many."""

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Base of the rolling hash, a polynomial in it modulo 2^64; any large odd number."""

LONGEST_RUN = 4096
"""Windows in a run at most: a longer one goes on as another with the same key."""

_MIX = np.uint64(0xBF58476D1CE4E5B9)
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)


def block_bytes_for(min_bytes: int) -> int:
    """Bytes of a block. Longer ones make more runs, shorter ones more groups of several runs; a half is between."""
    return max(1, min_bytes // 2)


def window_runs(texts: Texts, min_bytes: int, first_byte: int = 0) -> np.ndarray:
    """All windows of some texts as runs.

    Args:
        texts: the texts; no window reaches across the border of two.
        min_bytes: bytes in a window.
        first_byte: place of the first text's first byte, in the count that the runs use.

    Returns:
        RUN [runs], in the order of the text.
    """
    keys, firsts, counts = _window_runs(texts.buffer, texts.offsets, min_bytes, block_bytes_for(min_bytes))
    runs = np.empty(keys.size, RUN)
    runs["key"], runs["count"] = keys, counts
    runs["first"] = firsts + (first_byte - texts.offsets[0])
    return runs


@kernel
def doubled(array: np.ndarray) -> np.ndarray:
    """A copy with as much room again behind it."""
    larger = np.empty(2 * array.size, array.dtype)
    larger[: array.size] = array
    return larger


@kernel
def mixed(value: np.uint64) -> np.uint64:
    """Spread a hash over all bits: a polynomial's low bits depend on few of the bytes."""
    value ^= value >> _HALF
    value *= _MIX
    return value ^ (value >> _HALF)


@kernel
def power(exponent: int) -> np.uint64:
    """BASE to a power, modulo 2^64."""
    result = _ONE
    for _ in range(exponent):
        result *= BASE
    return result


@kernel
def hash_of(buffer: np.ndarray, place: int, size: int) -> np.uint64:
    """Hash of the bytes at a place."""
    value = np.uint64(0)
    for byte in range(place, place + size):
        value = value * BASE + np.uint64(buffer[byte]) + _ONE
    return value


@kernel
def rolled(value: np.uint64, leaving: int, entering: int, weight: np.uint64) -> np.uint64:
    """Hash of the bytes one further on, where weight is `power(size)`."""
    return value * BASE + (np.uint64(entering) + _ONE) - (np.uint64(leaving) + _ONE) * weight


@kernel
def _window_runs(
    buffer: np.ndarray, offsets: np.ndarray, min_bytes: int, block_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scan piece after piece, with room for all that a piece may need. The scan is a function of its own because an
    array that a loop may replace makes the loop ten times slower."""
    num_slots = 1
    while num_slots < min_bytes - block_bytes + 1:
        num_slots *= 2
    recent = np.empty(num_slots, np.uint64)
    keys = np.empty(2 * LONGEST_RUN + (offsets[-1] - offsets[0]) // 16, np.uint64)
    firsts, counts = np.empty(keys.size, np.int64), np.empty(keys.size, np.int32)
    num_runs = 0
    for text in range(offsets.size - 1):
        behind_last = offsets[text + 1] - min_bytes + 1
        for first in range(offsets[text], behind_last, LONGEST_RUN):
            if num_runs + LONGEST_RUN > keys.size:
                keys, firsts, counts = doubled(keys), doubled(firsts), doubled(counts)
            behind = min(first + LONGEST_RUN, behind_last)
            num_runs = _scan(buffer, first, behind, min_bytes, block_bytes, recent, (keys, firsts, counts), num_runs)
    return keys[:num_runs], firsts[:num_runs], counts[:num_runs]


@kernel
def _scan(
    buffer: np.ndarray,
    first: int,
    behind: int,
    min_bytes: int,
    block_bytes: int,
    recent: np.ndarray,
    runs: tuple[np.ndarray, np.ndarray, np.ndarray],
    num_runs: int,
) -> int:
    """Append the runs of the windows `first` to `behind - 1`; return the number of runs there are now.

    `recent` holds the hashes of the latest blocks, by place modulo its size.
    """
    keys, firsts, counts = runs
    reach = min_bytes - block_bytes  # a window's last block begins this far behind the window
    slot_mask, weight = recent.size - 1, power(block_bytes)
    value = hash_of(buffer, first, block_bytes)
    smallest, holder = _LARGEST, first
    key, start = _LARGEST, first
    for block in range(first, behind + reach):
        if block > first:
            value = rolled(value, buffer[block - 1], buffer[block + block_bytes - 1], weight)
        latest, window = mixed(value), block - reach
        recent[block & slot_mask] = latest
        if latest <= smallest:
            smallest, holder = latest, block
        elif holder < window:
            smallest, holder = _smallest(recent, window, block)
        if window == first or (window > first and smallest != key):
            if window > first:
                counts[num_runs - 1] = window - start
            key, start = smallest, window
            keys[num_runs], firsts[num_runs] = key, start
            num_runs += 1
    counts[num_runs - 1] = behind - start
    return num_runs


@kernel
def _smallest(recent: np.ndarray, first: int, last: int) -> tuple[np.uint64, int]:
    """The smallest hash of the blocks first to last, and the last of those that have it."""
    smallest, holder = recent[first & (recent.size - 1)], first
    for block in range(first + 1, last + 1):
        value = recent[block & (recent.size - 1)]
        if value <= smallest:
            smallest, holder = value, block
    return smallest, holder
