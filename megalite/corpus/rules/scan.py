"""The pass over the bytes: document -> lines -> chunks -> characters, each level a function that the next calls.

    The  quiet goon.\\n        line      hashes of it with and without the blanks at its ends; its ends, its length
    ^^^  ^^^^^ ^^^^^           chunk     between blanks
    ^^^  ^^^^^ ^^^^            word      the chunk without the punctuation at its ends

Counts go straight into the document's row of the table (`columns.py`). What needs comparing with the rest of the
document (lines, paragraphs, words) leaves a 64-bit hash and a length in `Units`, and is compared when the document has
been read. Every character is decoded once and hashed once: the hash starts anew where a word begins, and its value at
the last letter is the word's, at the blank the chunk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megalite.corpus.rules.characters import (
    ALPHANUMERIC,
    BLANK,
    BULLET,
    DIGIT,
    LETTER,
    PUNCTUATION,
    TERMINAL,
    decode,
)
from megalite.corpus.rules.columns import (
    ALPHANUMERICS,
    BULLET_LINES,
    CHUNKS,
    CODE_POINTS,
    DIGITS,
    DUPLICATE_LINE_CHARS,
    DUPLICATE_LINES,
    DUPLICATE_PARAGRAPH_CHARS,
    DUPLICATE_PARAGRAPHS,
    ELLIPSES,
    ELLIPSIS_LINES,
    FILLED_LINES,
    HASH_SIGNS,
    LETTER_CHUNKS,
    LINE_CHARS,
    LINES,
    NEWLINES,
    PARAGRAPHS,
    REPEATED_LINES,
    SHORT_LINES,
    STOP_WORDS,
    TERMINAL_LINES,
    WORD_CHARS,
    WORDS,
)
from megalite.corpus.rules.duplicates import SPREAD, HashTable, count_duplicates
from megalite.kernel import bare_kernel

SEED = np.uint64(0xCBF29CE484222325)
"""Where a hash begins; then, character by character, hash = (hash xor character) * FACTOR."""
FACTOR = np.uint64(0xD6E8FEB86659FD93)

NEWLINE, DOT, HASH_SIGN, ELLIPSIS = 0x0A, 0x2E, 0x23, 0x2026


class ScanSettings(NamedTuple):
    """What the settings say about characters, words and lines."""

    classes: np.ndarray
    """`character_classes`"""
    stop_words: np.ndarray
    """`make_word_set`"""
    short_line_chars: int


class Units(NamedTuple):
    """Lines, paragraphs and words of the document at hand."""

    hashes: np.ndarray
    """uint64 [4, units]: rows LINE, STRIPPED, PARAGRAPH and WORD."""
    num_chars: np.ndarray
    """int32 [4, units]: their lengths; STRIPPED is not used."""


LINE, STRIPPED, PARAGRAPH, WORD = range(4)
"""A line as it is, without the blanks at its ends; a paragraph; a word, or a chunk of pure punctuation as it is, so
that a run of words has no gaps."""


def make_units(most_bytes: int) -> Units:
    """Room for a document of so many bytes. Memory is taken from the system only where it is touched."""
    most = most_bytes // 2 + 1  # a line, a paragraph or a word takes a byte, and one that parts it from the next
    return Units(np.empty((4, most), np.uint64), np.empty((4, most), np.int32))


def make_word_set(words: tuple[str, ...]) -> np.ndarray:
    """`make_hash_set` of at most 63 words, by the hashes that this module makes."""
    points = [np.array([ord(character) for character in word], np.int64) for word in sorted(set(words))]
    return make_hash_set([int(_hash_word(each)) for each in points])


def make_hash_set(hashes: Sequence[int]) -> np.ndarray:
    """An open hash table, uint64 [2, a power of two]: each hash, and a flag of its own. A hash of 0 is a free slot."""
    slots = np.zeros((2, 1 << max(4, (8 * len(hashes)).bit_length())), np.uint64)
    for number, hashed in enumerate(hashes):
        _add_hash(slots, np.uint64(hashed), np.uint64(1 << number))
    return slots


@bare_kernel
def scan_document(
    buffer: np.ndarray, at: int, end: int, meaning: ScanSettings, units: Units, table: HashTable, row: np.ndarray
) -> None:
    """Fill a document's row, but for C4's columns, bad words and n-grams.

    Args:
        buffer: uint8, valid UTF-8 from `at` to `end`.
        meaning: of characters, words and lines.
        units: left with the lines, paragraphs and words of this document.
        table: for looking up duplicates.
        row: int64 [columns], zeros.
    """
    classes, stop_words, hashes, num_chars = meaning.classes, meaning.stop_words, units.hashes, units.num_chars
    paragraph, paragraph_chars = SEED, 0
    while True:
        line = row[FILLED_LINES]
        at, line_chars = _scan_line(buffer, at, end, classes, stop_words, hashes, num_chars, row)
        if row[FILLED_LINES] > line:
            row[SHORT_LINES] += line_chars <= meaning.short_line_chars
            paragraph = (paragraph ^ hashes[LINE, line]) * FACTOR
            paragraph_chars += num_chars[LINE, line] + (paragraph_chars > 0)
        if paragraph_chars > 0 and (row[FILLED_LINES] == line or at == end):
            hashes[PARAGRAPH, row[PARAGRAPHS]] = paragraph
            num_chars[PARAGRAPH, row[PARAGRAPHS]] = paragraph_chars
            row[PARAGRAPHS] += 1
            paragraph, paragraph_chars = SEED, 0
        if at == end:
            break
        at += 1
        row[NEWLINES] += 1
    row[STOP_WORDS] = count_flags(row[STOP_WORDS])
    row[CODE_POINTS] = row[LINE_CHARS] + row[NEWLINES]
    num_lines, num_paragraphs = row[FILLED_LINES], row[PARAGRAPHS]
    row[REPEATED_LINES] = count_duplicates(hashes[STRIPPED], num_chars[LINE], num_lines, table)[0]
    found = count_duplicates(hashes[LINE], num_chars[LINE], num_lines, table)
    row[DUPLICATE_LINES], row[DUPLICATE_LINE_CHARS] = found
    found = count_duplicates(hashes[PARAGRAPH], num_chars[PARAGRAPH], num_paragraphs, table)
    row[DUPLICATE_PARAGRAPHS], row[DUPLICATE_PARAGRAPH_CHARS] = found


@bare_kernel
def _scan_line(
    buffer: np.ndarray,
    at: int,
    end: int,
    classes: np.ndarray,
    stop_words: np.ndarray,
    hashes: np.ndarray,
    num_chars: np.ndarray,
    row: np.ndarray,
) -> tuple[int, int]:
    """Read a line; returns where its "\\n" is, or `end`, and its characters."""
    chars, first_kind, last_kind, ends_in_ellipsis = 0, 0, 0, False
    indent, stripped, hashed = SEED, SEED, SEED
    filled = False
    while at < end:
        point, after = decode(buffer, at)
        if point == NEWLINE:
            break
        kind = classes[point]
        if kind & BLANK:
            hashed = (hashed ^ np.uint64(point)) * FACTOR
            chars += 1
            at = after
            continue
        if not filled:
            filled, first_kind = True, kind
            indent, hashed = hashed, SEED
        chunk = _scan_chunk(buffer, at, end, classes)
        _count_chunk(chunk, stop_words, hashes, num_chars, row)
        at, last_kind, ends_in_ellipsis = chunk.end, chunk.last_kind, chunk.ends_in_ellipsis
        hashed = (hashed ^ chunk.hashed) * FACTOR
        stripped = hashed
        chars += chunk.chars
    row[LINES] += 1
    row[LINE_CHARS] += chars
    row[BULLET_LINES] += (first_kind & BULLET) != 0
    row[TERMINAL_LINES] += (last_kind & TERMINAL) != 0
    row[ELLIPSIS_LINES] += ends_in_ellipsis
    if filled:
        line = row[FILLED_LINES]
        hashes[LINE, line] = (indent * FACTOR) ^ hashed
        hashes[STRIPPED, line] = stripped
        num_chars[LINE, line] = chars
        row[FILLED_LINES] += 1
    return at, chars


class Chunk(NamedTuple):
    """What stands between two blanks."""

    end: int
    hashed: np.uint64
    chars: int
    word: np.uint64
    """Hash of the word in it; of the chunk when there is none."""
    word_chars: int
    """0 when there is none."""
    kinds: int
    """Flags of all its characters but punctuation."""
    last_kind: int
    alphanumerics: int
    digits: int
    hash_signs: int
    ellipses: int
    ends_in_ellipsis: bool


@bare_kernel
def _scan_chunk(buffer: np.ndarray, at: int, end: int, classes: np.ndarray) -> Chunk:
    """Read to the next blank."""
    chars, dots, kind, kinds = 0, 0, 0, 0
    alphanumerics, digits, hash_signs, ellipses = 0, 0, 0, 0
    before, word_chars = -1, 0
    opening, hashed, word = SEED, SEED, SEED
    while at < end:
        point, after = decode(buffer, at)
        this_kind = classes[point]
        if this_kind & BLANK:
            break
        kind, at = this_kind, after
        if kind & PUNCTUATION:
            dots = dots + 1 if point == DOT else 0
            hash_signs += point == HASH_SIGN
            ellipses += point == ELLIPSIS or (dots > 0 and dots % 3 == 0)
            hashed = (hashed ^ np.uint64(point)) * FACTOR
            chars += 1
        else:
            dots = 0
            if before < 0:
                before = chars
                opening, hashed = hashed, SEED
            hashed = (hashed ^ np.uint64(point)) * FACTOR
            chars += 1
            word, word_chars = hashed, chars - before
            kinds |= kind
            alphanumerics += (kind & ALPHANUMERIC) != 0
            digits += (kind & DIGIT) != 0
    if before >= 0:
        hashed ^= opening * FACTOR
    else:
        word = hashed
    ends = dots >= 3 or _ends_with_ellipsis_sign(buffer, at)
    return Chunk(at, hashed, chars, word, word_chars, kinds, kind, alphanumerics, digits, hash_signs, ellipses, ends)


@bare_kernel
def _count_chunk(
    chunk: Chunk, stop_words: np.ndarray, hashes: np.ndarray, num_chars: np.ndarray, row: np.ndarray
) -> None:
    """Add a chunk to the document's row, and its word to the document's words."""
    index = row[CHUNKS]
    row[CHUNKS] += 1
    row[ALPHANUMERICS] += chunk.alphanumerics
    row[DIGITS] += chunk.digits
    row[HASH_SIGNS] += chunk.hash_signs
    row[ELLIPSES] += chunk.ellipses
    row[LETTER_CHUNKS] += (chunk.kinds & LETTER) != 0
    row[WORDS] += chunk.word_chars > 0
    row[WORD_CHARS] += chunk.word_chars
    if chunk.word_chars > 0:
        row[STOP_WORDS] |= flag_of_word(stop_words, chunk.word)  # flags, until the document has been read
    hashes[WORD, index] = chunk.word
    num_chars[WORD, index] = chunk.word_chars if chunk.word_chars > 0 else chunk.chars


@bare_kernel
def _ends_with_ellipsis_sign(buffer: np.ndarray, end: int) -> bool:
    """Whether U+2026, which is E2 80 A6, stands before `end`; a character does."""
    return buffer[end - 1] == 0xA6 and buffer[end - 2] == 0x80 and buffer[end - 3] == 0xE2


@bare_kernel
def flag_of_word(slots: np.ndarray, word: np.uint64) -> int:
    """The flag of a word of the set, 0 for other words."""
    mask = slots.shape[1] - 1
    slot = np.int64((word * SPREAD) >> np.uint64(40)) & mask
    while slots[0, slot] != 0:
        if slots[0, slot] == word:
            return np.int64(slots[1, slot])
        slot = (slot + 1) & mask
    return 0


@bare_kernel
def count_flags(flags: int) -> int:
    """How many bits of a number are set."""
    count = 0
    while flags:
        flags &= flags - 1
        count += 1
    return count


@bare_kernel
def _hash_word(points: np.ndarray) -> np.uint64:
    hashed = SEED
    for point in points:
        hashed = (hashed ^ np.uint64(point)) * FACTOR
    return hashed


@bare_kernel
def _add_hash(slots: np.ndarray, hashed: np.uint64, flag: np.uint64) -> None:
    mask = slots.shape[1] - 1
    slot = np.int64((hashed * SPREAD) >> np.uint64(40)) & mask
    while slots[0, slot] != 0:
        slot = (slot + 1) & mask
    slots[0, slot] = hashed
    slots[1, slot] = flag
