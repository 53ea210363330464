"""Short words found without a loop: eight bytes as one number, for compiled code.

    text    _the quick   (_ is a blank)
    word    6b 63 69 75 71 20 65 68 74 20       the first byte lowest
            marks of what is no letter: .. 80 .. .. .. ..     the lowest one is where the word ends

A loop over the bytes of a word ends after another number of steps each time, which a processor guesses wrong about once
a word; that costs more than all of this arithmetic. Most words of a text are a blank and a few letters.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel

WORD_BYTES = 8

ALL = 0xFFFFFFFFFFFFFFFF

ONES = 0x0101010101010101
"""A 1 in every byte."""

HIGH = 0x80 * ONES
LOW_7 = 0x7F * ONES
LOWER_CASE = 0x20 * ONES
FROM_A = (0x80 - ord("a")) * ONES
"""Added to seven bits, it sets the eighth in those from a on."""
BEYOND_Z = (0x80 - ord("z") - 1) * ONES

BLANK = 0x20


@bare_kernel
def eight_bytes(buffer: np.ndarray, start: int) -> int:
    """Bytes start..start+7 as uint64, the first one lowest; LLVM makes one load of it."""
    place = np.uint64(start)  # unsigned, or numba looks for negative ones
    word = np.uint64(buffer[place])
    for number in range(1, WORD_BYTES):
        word |= np.uint64(buffer[place + np.uint64(number)]) << np.uint64(8 * number)
    return word


@bare_kernel
def first_bytes(word: int, size: int) -> int:
    """The first `size` bytes of eight, 1 to 8; the others 0."""
    return word & np.uint64(ALL) >> np.uint64(64 - 8 * size)


@bare_kernel
def letters_size(word: int) -> int:
    """Bytes of the word of GPT-2's pattern at the beginning of eight: a blank or none, then letters of ASCII.

    0 where it takes more to know: no letter, a word that goes on behind the eight, a character beyond ASCII behind it.
    """
    lower = (word | np.uint64(LOWER_CASE)) & np.uint64(LOW_7)
    letters = (lower + np.uint64(FROM_A)) & ~(lower + np.uint64(BEYOND_Z)) & ~word
    blank = np.uint64((word & np.uint64(0xFF)) == np.uint64(BLANK))
    others = ~letters & np.uint64(HIGH) & ~(blank << np.uint64(7))
    mark = others & (~others + np.uint64(1))
    if mark == 0 or mark & word:
        return 0
    size = (((mark - np.uint64(1)) & np.uint64(ONES)) * np.uint64(ONES) >> np.uint64(56)) - np.uint64(1)
    return np.int64(size) if size > blank else 0
