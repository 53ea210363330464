"""Repeated runs of words (n-grams): Gopher's most frequent 2- to 4-grams and repeated 5- to 10-grams.

The plain way makes a string of every n-gram of nine lengths and puts it in a set. Here an n-gram is named by its two
halves that overlap, so that a table of integers does, and lengths are tried one after the other:

    words          the cat  sat   and  the  cat  ran
    1-grams        0   1    .     .    0    1    .        named by first occurrence; . occurs once
    2-grams        0             .     0    .             (name of words 1..n-1, name of words 2..n) is the name
    3-grams                                               only pairs of neighbours that both occur twice are looked up

An n-gram that occurs twice holds two (n-1)-grams that do. So most positions fall away after two or three rounds: of a
usual text nine lengths cost little more than two. Names are exact, except that a word is known by its hash.

The meaning is that of the filters in use. The most frequent n-gram is the first one of those that occur most often,
and it counts even when it occurs once, which throws out texts of a few words. For repeated n-grams the text is read
from the left: one that was read before counts, and reading goes on behind it; one that is new is remembered, and
reading goes on at the next word. What was skipped was not read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.corpus.rules.columns import DUPLICATE_5GRAM_CHARS, TOP_2GRAM_CHARS
from megalite.corpus.rules.duplicates import HashTable, find_first, start_use
from megalite.kernel import bare_kernel

TOP_LENGTHS = (2, 3, 4)
DUPLICATE_LENGTHS = (5, 6, 7, 8, 9, 10)

LONGEST_TOP = TOP_LENGTHS[-1]
LONGEST = DUPLICATE_LENGTHS[-1]


class Grams(NamedTuple):
    """Room for the n-grams of a document that may still be repeated, in order of position."""

    positions: np.ndarray
    """int32: the first word of each."""
    names: np.ndarray
    """int32: equal for equal n-grams of this length."""
    keys: np.ndarray
    """uint64: the names of both halves."""
    counts: np.ndarray
    """int32: occurrences of each name."""
    borders: np.ndarray
    """int64 [words + 1]: characters before each word, blanks not counted."""


def make_grams(most_words: int) -> Grams:
    """Room for a document of so many words. Memory is taken from the system only where it is touched."""
    return Grams(
        positions=np.empty(most_words, np.int32),
        names=np.empty(most_words, np.int32),
        keys=np.empty(most_words, np.uint64),
        counts=np.empty(most_words, np.int32),
        borders=np.empty(most_words + 1, np.int64),
    )


@bare_kernel
def measure_repetition(
    words: np.ndarray,
    word_chars: np.ndarray,
    num_words: int,
    grams: Grams,
    table: HashTable,
    row: np.ndarray,
    longest: int,
) -> None:
    """Fill the n-gram columns of a document's row.

    Args:
        words: uint64, a hash of each word.
        word_chars: int32, its characters.
        num_words: of this document.
        grams: room for at least as many.
        table: for looking up names.
        row: int64 [columns].
        longest: LONGEST, or LONGEST_TOP for the most frequent n-grams alone.
    """
    grams.borders[0] = 0
    for word in range(num_words):
        grams.borders[word + 1] = grams.borders[word] + word_chars[word]
        grams.positions[word] = word
        grams.keys[word] = words[word]
    num_grams = num_words
    for length in range(1, longest + 1):
        if length > 1:
            num_grams = _lengthen(grams, num_grams)
        _name(grams, num_grams, table)
        if 1 < length <= LONGEST_TOP and length <= num_words:
            row[TOP_2GRAM_CHARS + length - 2] = _top_chars(grams, num_grams, length)
        num_grams = _keep_repeated(grams, num_grams)
        if length > LONGEST_TOP:
            if num_grams == 0:
                break
            row[DUPLICATE_5GRAM_CHARS + length - 5] = _duplicate_chars(grams, num_grams, length)


@bare_kernel
def _lengthen(grams: Grams, num_grams: int) -> int:
    """Make the keys of the n-grams whose both (n-1)-grams are repeated."""
    made = 0
    for gram in range(num_grams - 1):
        if grams.positions[gram + 1] == grams.positions[gram] + 1:
            left, right = np.uint64(grams.names[gram]), np.uint64(grams.names[gram + 1])
            grams.keys[made] = left << np.uint64(32) | right
            grams.positions[made] = grams.positions[gram]
            made += 1
    return made


@bare_kernel
def _name(grams: Grams, num_grams: int, table: HashTable) -> None:
    """Name each n-gram by the index of its first occurrence, and count each name."""
    generation, shift = start_use(table, num_grams)
    for gram in range(num_grams):
        name = find_first(table.slots, generation, shift, grams.keys, gram)
        grams.names[gram] = name
        if name == gram:
            grams.counts[name] = 1
        else:
            grams.counts[name] += 1


@bare_kernel
def _keep_repeated(grams: Grams, num_grams: int) -> int:
    """Move the n-grams that occur twice to the front. Names and counts stay as they are."""
    kept = 0
    for gram in range(num_grams):
        name = grams.names[gram]
        if grams.counts[name] > 1:
            grams.positions[kept] = grams.positions[gram]
            grams.names[kept] = name
            kept += 1
    return kept


@bare_kernel
def _top_chars(grams: Grams, num_grams: int, length: int) -> int:
    """Characters of all occurrences of the most frequent n-gram, a blank between words counted."""
    most, position = 1, np.int32(0)  # when nothing is repeated, the first n-gram of the text
    for gram in range(num_grams):
        if grams.names[gram] == gram and grams.counts[gram] > most:
            most, position = grams.counts[gram], grams.positions[gram]
    return most * (grams.borders[position + length] - grams.borders[position] + length - 1)


@bare_kernel
def _duplicate_chars(grams: Grams, num_grams: int, length: int) -> int:
    """Characters of words in n-grams that were read before, reading on behind each. Marks names by their counts."""
    chars, next_position = 0, 0
    for gram in range(num_grams):
        position = grams.positions[gram]
        if position < next_position:
            continue
        name = grams.names[gram]
        if grams.counts[name] < 0:
            chars += grams.borders[position + length] - grams.borders[position]
            next_position = position + length
        else:
            grams.counts[name] = -1
    return chars
