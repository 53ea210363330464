"""Spans of texts, and how they are cut out: whole characters, whole words, no two words glued together.

    spans    int64 [n, 3]: text, first byte, byte behind the last; sorted, none touching another of the same text

A finder says which bytes are to go and knows nothing of words. Before a cut each span gives way, always inwards, so
that nothing is lost that was not found:

    found     The qui[ck brown fox jumps over the la]zy dog      both ends lie inside a word
    whole     The quick[ brown fox jumps over the ]lazy dog      the words "quick" and "lazy" stay
    kept      The quick [brown fox jumps over the ]lazy dog      one character stays where two words would meet

A word here is a run of ASCII letters, digits, and characters of two bytes (Latin, Greek, Cyrillic, Hebrew, Arabic).
Characters of three and four bytes (Chinese, Japanese) stand for themselves: such text has no blanks between words. A
"word" longer than LONGEST_WORD bytes is none (base64, a DNA sequence) and is cut between any two characters.

Imports numba at import; import it where the cutting begins.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import kernel
from megalite.texts import Texts

LONGEST_WORD = 48
"""Bytes that a span gives way to keep a word whole."""

TEXT_SHIFT = 32
"""Text and byte as one number, text << 32 | byte: sorts as the pair does. A text has less than 4 GiB."""

Spans = np.ndarray
"""int64 [n, 3]: text, first byte, byte behind the last. Bytes count from the beginning of the text."""


def merge_spans(spans: Spans) -> Spans:
    """Sort spans, and join those of one text that overlap or touch."""
    if not len(spans):
        return np.zeros((0, 3), np.int64)
    starts = spans[:, 0] << TEXT_SHIFT | spans[:, 1]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reached = np.maximum.accumulate(spans[order, 0] << TEXT_SHIFT | spans[order, 2])
    begins = np.empty(starts.size, bool)
    begins[0] = True
    begins[1:] = starts[1:] > reached[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], starts.size) - 1
    text, start = starts[first] >> TEXT_SHIFT, starts[first] & ((1 << TEXT_SHIFT) - 1)
    return np.stack([text, start, reached[last] - (text << TEXT_SHIFT)], axis=1)


def covered_bytes(spans: Spans, num_texts: int) -> np.ndarray:
    """Bytes of each text inside merged spans, int64 [num_texts]."""
    total = np.zeros(num_texts, np.int64)
    np.add.at(total, spans[:, 0], spans[:, 2] - spans[:, 1])
    return total


def cut(texts: Texts, spans: Spans) -> Texts:
    """The texts without some of their bytes.

    Args:
        texts: UTF-8.
        spans: merged, and trimmed by `trim_to_words`.

    Returns:
        As many texts; one that was covered whole is empty.
    """
    return Texts(*_cut(texts.buffer, texts.offsets, np.ascontiguousarray(spans)))


def trim_to_words(texts: Texts, spans: Spans) -> Spans:
    """Shorten each span until it cuts no character and no word in two, and glues no two words together.

    Args:
        texts: UTF-8.
        spans: merged.

    Returns:
        Those that have a byte left.
    """
    trimmed = _trim(texts.buffer, texts.offsets, np.ascontiguousarray(spans))
    return trimmed[trimmed[:, 1] < trimmed[:, 2]]


@kernel
def has_ink(buffer: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which texts hold more than ASCII blanks, bool [texts]."""
    ink = np.zeros(offsets.size - 1, np.bool_)
    for text in range(ink.size):
        place = offsets[text]
        while place < offsets[text + 1] and not ink[text]:
            ink[text] = buffer[place] != 32 and not 9 <= buffer[place] <= 13
            place += 1
    return ink


@kernel
def _trim(buffer: np.ndarray, offsets: np.ndarray, spans: np.ndarray) -> np.ndarray:
    trimmed = spans.copy()
    for row in range(spans.shape[0]):
        text = spans[row, 0]
        begin, end = offsets[text], offsets[text + 1]
        first = _next_border(buffer, begin, end, begin + spans[row, 1])
        behind = _previous_border(buffer, begin, end, begin + spans[row, 2])
        meet = begin < first < behind < end and _is_word(buffer[first - 1]) and _is_word(buffer[behind])
        if meet and not _is_word(buffer[first]):
            first = _next_character(buffer, first + 1, end)
        trimmed[row, 1], trimmed[row, 2] = first - begin, behind - begin
    return trimmed


@kernel
def _is_word(byte: int) -> bool:
    """ASCII letters and digits, and every byte of a character of two; the last byte of a longer one does not differ
    from that of a character of two, so a word next to Chinese text may count as longer than it is."""
    lower = byte | 32
    return (97 <= lower <= 122) or (48 <= byte <= 57) or (128 <= byte < 224)


@kernel
def _next_character(buffer: np.ndarray, place: int, end: int) -> int:
    while place < end and buffer[place] & 0xC0 == 0x80:
        place += 1
    return place


@kernel
def _is_border(buffer: np.ndarray, begin: int, end: int, place: int) -> bool:
    """Whether a text may be cut before this byte."""
    if place <= begin or place >= end:
        return True
    return not (_is_word(buffer[place - 1]) and _is_word(buffer[place]))


@kernel
def _next_border(buffer: np.ndarray, begin: int, end: int, place: int) -> int:
    """The first border at or behind a byte; the next character where a long word hides it."""
    place = _next_character(buffer, place, end)
    border = place
    while not _is_border(buffer, begin, end, border):
        border = _next_character(buffer, border + 1, end)
        if border - place > LONGEST_WORD:
            return place
    return border


@kernel
def _previous_border(buffer: np.ndarray, begin: int, end: int, place: int) -> int:
    """The last border at or before a byte; the character before where a long word hides it."""
    while begin < place < end and buffer[place] & 0xC0 == 0x80:
        place -= 1
    border = place
    while not _is_border(buffer, begin, end, border):
        border -= 1
        while border > begin and buffer[border] & 0xC0 == 0x80:
            border -= 1
        if place - border > LONGEST_WORD:
            return place
    return border


@kernel
def _cut(buffer: np.ndarray, offsets: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.empty(offsets[-1] - offsets[0], np.uint8)
    new_offsets = np.zeros(offsets.size, np.int64)
    written, row = 0, 0
    for text in range(offsets.size - 1):
        place = offsets[text]
        while row < spans.shape[0] and spans[row, 0] == text:
            size = offsets[text] + spans[row, 1] - place
            kept[written : written + size] = buffer[place : place + size]
            written, place = written + size, offsets[text] + spans[row, 2]
            row += 1
        size = offsets[text + 1] - place
        kept[written : written + size] = buffer[place : place + size]
        written += size
        new_offsets[text + 1] = written
    return kept[:written], new_offsets
