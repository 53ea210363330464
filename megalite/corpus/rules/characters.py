"""Characters as the compiled kernels see them: UTF-8 decoded by hand, classes looked up in a table.

Every one of Unicode's 0x110000 code points has a byte of flags, taken once from `str.isspace`, `str.isalpha` and the
like. So a kernel means exactly what Python's methods mean, in every script; a kernel that knew only ASCII would not see
the blanks of Chinese or the letters of Greek. The table takes 1.1 MB, of which a text touches only its own scripts.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np

from megalite.kernel import bare_kernel

NUM_CODE_POINTS = 0x110000

BLANK = 1
"""str.isspace"""
LETTER = 2
"""str.isalpha"""
ALPHANUMERIC = 4
"""str.isalnum"""
DIGIT = 8
"""str.isdecimal: the digits of all scripts, no fractions and no superscripts"""
PUNCTUATION = 16
"""Unicode's categories P (punctuation) and S (symbols, emoji among them)"""
WORD = 32
"""Letters, digits and the underscore: `\\w` of regular expressions"""
TERMINAL = 64
"""What may end a sentence, by the settings"""
BULLET = 128
"""What begins an item of a list"""

BULLETS = "•-"


@lru_cache(maxsize=4)
def character_classes(terminal_characters: str = "") -> np.ndarray:
    """Flags of every code point, uint8 [0x110000].

    Args:
        terminal_characters: those that get the flag TERMINAL.
    """
    classes = _plain_classes().copy()
    classes[[ord(character) for character in terminal_characters]] |= TERMINAL
    classes[[ord(character) for character in BULLETS]] |= BULLET
    classes.setflags(write=False)
    return classes


@lru_cache(maxsize=1)
def _plain_classes() -> np.ndarray:
    characters = list(map(chr, range(NUM_CODE_POINTS)))
    classes = np.zeros(NUM_CODE_POINTS, np.uint8)
    tests = {BLANK: str.isspace, LETTER: str.isalpha, ALPHANUMERIC | WORD: str.isalnum, DIGIT: str.isdecimal}
    for flag, test in tests.items():
        classes[np.fromiter(map(test, characters), bool, NUM_CODE_POINTS)] |= flag
    categories = np.fromiter(map(unicodedata.category, characters), "U1", NUM_CODE_POINTS)  # U1: the first letter
    classes[(categories == "P") | (categories == "S")] |= PUNCTUATION
    classes[ord("_")] |= WORD
    return classes


@bare_kernel
def decode(buffer: np.ndarray, at: int) -> tuple[int, int]:
    """The code point that begins at a byte of valid UTF-8, and the byte after it."""
    lead = np.int64(buffer[at])
    if lead < 0x80:
        return lead, at + 1
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | _tail(buffer, at + 1), at + 2
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | _tail(buffer, at + 1) << 6 | _tail(buffer, at + 2), at + 3
    high = (lead & 0x07) << 18 | _tail(buffer, at + 1) << 12
    return high | _tail(buffer, at + 2) << 6 | _tail(buffer, at + 3), at + 4


@bare_kernel
def start_of_last(buffer: np.ndarray, end: int) -> int:
    """Where the character begins that ends before the byte `end`."""
    end -= 1
    while buffer[end] & 0xC0 == 0x80:
        end -= 1
    return end


@bare_kernel
def _tail(buffer: np.ndarray, at: int) -> int:
    return np.int64(buffer[at]) & 0x3F
