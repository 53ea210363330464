"""The table behind a quick check of Unicode's composed form (NFC), and the slow way for the texts that fail it.

The check is the one of the Unicode standard (UAX 15, section 9): a text is in the form when no character of it could
change or join the one before, and combining marks stand in the order of their classes. Text that fails may still be in
the form; then it is only looked at twice. Nearly every text of the web passes.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np

from megalite.data.repair.splice import Patch
from megalite.data.texts import Texts

FIRST_MARK = 0x300
"""Below this every character is in the form and none is a combining mark."""

END_OF_MARKS = 0x30000
"""From here on likewise: beyond lie rare ideographs, tags and private characters."""

UNSTABLE = 255
"""In the table: the character may change or join another. Other values are combining classes, at most 240."""

HANGUL_VOWELS_AND_TAILS = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))
"""Letters that join the syllable before them, by rule and not by table (Unicode standard, section 3.12)."""


@lru_cache(maxsize=1)
def mark_table() -> np.ndarray:
    """uint8 [END_OF_MARKS]: the combining class of each character, or UNSTABLE."""
    table = np.zeros(END_OF_MARKS, np.uint8)
    for code in range(FIRST_MARK, END_OF_MARKS):
        character = chr(code)
        table[code] = unicodedata.combining(character)
        parts = unicodedata.decomposition(character)
        if not parts or parts.startswith("<"):
            continue
        if unicodedata.normalize("NFC", character) != character:
            table[code] = UNSTABLE
    for code in (*_second_parts(), *HANGUL_VOWELS_AND_TAILS):
        table[code] = UNSTABLE
    return table


def normal_form_patches(texts: Texts, documents: np.ndarray) -> list[Patch]:
    """What to replace, so that the given documents are in the form.

    Args:
        texts: all of them.
        documents: int64, those that failed the quick check, ascending.
    """
    patches = []
    for document in documents.tolist():
        text = texts[document]
        if not unicodedata.is_normalized("NFC", text):
            start, end = texts.offsets[document : document + 2].tolist()
            patches.append(Patch(document, start, end, unicodedata.normalize("NFC", text).encode()))
    return patches


def _second_parts() -> set[int]:
    """Characters that join the one before: the second of two that some composed character stands for."""
    seconds = set()
    for code in range(0xC0, END_OF_MARKS):
        parts = unicodedata.decomposition(chr(code))
        if parts and not parts.startswith("<") and " " in parts:
            seconds.add(int(parts.split()[1], 16))
    return seconds
