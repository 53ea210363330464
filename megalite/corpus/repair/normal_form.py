"""The table behind a quick check of Unicode's composed form (NFC), and the slow way for the texts that fail it.

The check is the one of the Unicode standard (UAX 15, section 9): a text is in the form when no character of it could
change or join the one before, and combining marks stand in the order of their classes. Text that fails may still be in
the form; then it is only looked at twice. Nearly every text of the web passes.

Python sorts the marks behind a letter by insertion, which for 100 kB of marks in the wrong order takes seconds and for
a megabyte minutes. Long runs are therefore put in order here first; the form of the text is the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from megalite.texts import Patch, Texts

FIRST_MARK = 0x300
"""Below this every character is in the form and none is a combining mark."""

END_OF_MARKS = 0x30000
"""From here on likewise: beyond lie rare ideographs, tags and private characters."""

UNSTABLE = 255
"""In the table: the character may change or join another. Other values are combining classes, at most 240."""

LONG_RUN = re.compile(r"\W{32,}")
"""Where more marks may stand behind one letter than any language needs; the standard's stream-safe format allows 30
(UAX 15, section 13). A mark is neither letter nor digit."""

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
        raw = texts[document]
        text = LONG_RUN.sub(_in_order, raw)
        if text != raw or not unicodedata.is_normalized("NFC", text):
            start, end = texts.offsets[document : document + 2].tolist()
            patches.append(Patch(document, start, end, unicodedata.normalize("NFC", text).encode()))
    return patches


def _in_order(run: re.Match[str]) -> str:
    """A run of characters that are no letters, its marks by their classes; those of one class stay in their order."""
    return _marks().sub(lambda marks: "".join(sorted(_apart(marks[0]), key=unicodedata.combining)), run[0])


def _apart(marks: str) -> Iterator[str]:
    for mark in marks:
        yield from unicodedata.normalize("NFD", mark)


@lru_cache(maxsize=1)
def _marks() -> re.Pattern[str]:
    """Runs of combining marks, and of characters that stand for nothing but marks."""
    decomposed = {code: unicodedata.normalize("NFD", chr(code)) for code in range(FIRST_MARK, END_OF_MARKS)}
    marks = [chr(code) for code, parts in decomposed.items() if unicodedata.combining(parts[0])]
    return re.compile(f"[{''.join(marks)}]{{2,}}")


def _second_parts() -> set[int]:
    """Characters that join the one before: the second of two that some composed character stands for."""
    seconds = set()
    for code in range(0xC0, END_OF_MARKS):
        parts = unicodedata.decomposition(chr(code))
        if parts and not parts.startswith("<") and " " in parts:
            seconds.add(int(parts.split()[1], 16))
    return seconds
