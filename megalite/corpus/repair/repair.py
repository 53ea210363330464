"""Repair of texts without judging them: the first thing that happens to a raw document.

    fix_encoding   mojibake set right, line by line (ftfy; off by default)
    tidy           one kind of line end, no control characters, no blanks at line ends, at most two empty lines on
                   end, none at the two ends of the document
    compose        Unicode NFC

One pass over the bytes finds the documents that need any of it. Most need nothing and are not touched; when that is
all of them, not even copied.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from megalite.corpus.repair.mojibake import encoding_patches
from megalite.texts import Patch, Texts, splice


def repair(texts: Texts, *, unicode_nfc: bool = True, fix_encoding: bool = False) -> Texts:
    """Repaired texts, in the same number and order; a second repair changes nothing, but for what it uncovers to ftfy.

    Args:
        texts: not changed; the result may share its memory.
        unicode_nfc: compose characters.
        fix_encoding: set mojibake right; slow, and needs ftfy.

    Raises:
        UnavailableError: fix_encoding without ftfy.
    """
    from megalite.corpus.repair.kernels import UNCOMPOSED, UNTIDY, rewrite, scan

    if fix_encoding:  # first: its bytes of C1 would be removed as control characters
        texts = splice(texts, encoding_patches(texts))
    flags = scan(texts.buffer, texts.offsets, mark_table(), unicode_nfc)
    if np.any(flags & UNTIDY):
        texts = Texts(*rewrite(texts.buffer, texts.offsets, flags))
    return splice(texts, normal_form_patches(texts, np.flatnonzero(flags & UNCOMPOSED)))


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
