"""The kernels behind `datatrove.py`: one document after the other, word by word and line by line.

Repeated runs of words are those of the strings that they make without blanks, as there: "ab c" is "a bc". The text is
read from the left; a run that was read before counts, and reading goes on behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.corpus.rules.characters import BLANK, TERMINAL, decode, start_of_last
from megalite.corpus.rules.columns import (
    DUPLICATE_5GRAM_CHARS,
    DUPLICATE_PARAGRAPH_CHARS,
    DUPLICATE_PARAGRAPHS,
    DUPLICATE_SPLIT_LINE_CHARS,
    DUPLICATE_SPLIT_LINES,
    PARAGRAPHS,
    SENTENCES,
    SPLIT_LINES,
    TERMINAL_LINES,
    TOKENS,
    TOKENS_WITH_LETTER,
    WORD_TOKEN_CHARS,
    WORD_TOKEN_STOP_WORDS,
    WORD_TOKENS,
)
from megalite.corpus.rules.duplicates import HashTable, count_duplicates, find_first, start_use
from megalite.corpus.rules.lexicon import (
    BASE,
    ENDS_SENTENCE,
    HAS_LETTER,
    IS_NO_SYMBOL,
    IS_PUNCTUATION,
    LETTERS,
    Entries,
    find_slot,
    next_chunk,
)
from megalite.corpus.rules.repetition import DUPLICATE_LENGTHS, LONGEST, LONGEST_TOP, Grams, measure_repetition
from megalite.corpus.rules.scan import count_flags, flag_of_word
from megalite.kernel import bare_kernel

RUNS, LINE_ENDS, SENTENCES_OF_LINES = 1, 2, 4
"""What to look at besides words: repeated runs, lines and paragraphs; ends of lines; C4's sentences."""

NEWLINE, SPACE = 0x0A, 0x20

ANY_RUN, LONG_RUN = 1, 2
"""Line ends on end that part lines, and paragraphs."""


class ScratchBuffers(NamedTuple):
    """The words of the document at hand; then its lines, then its paragraphs."""

    hashes: np.ndarray
    """uint64"""
    num_chars: np.ndarray
    """int32"""
    kinds: np.ndarray
    """uint8"""
    grams: Grams
    """For as many n-grams, if RUNS is wanted."""
    table: HashTable
    """For looking up as many."""


@bare_kernel
def scan_documents(
    buffer: np.ndarray,
    offsets: np.ndarray,
    classes: np.ndarray,
    entries: Entries,
    stop_words: np.ndarray,
    scratch: ScratchBuffers,
    wanted: int,
    statistics: np.ndarray,
) -> None:
    """Fill the columns of all documents.

    Args:
        buffer: uint8, valid UTF-8.
        offsets: int64 [documents + 1].
        classes: `character_classes`.
        entries: all chunks of the texts.
        stop_words: `make_hash_set`.
        scratch: for as many words as the longest document has bytes, and one more.
        wanted: flags.
        statistics: int64 [documents, columns].
    """
    for document in range(offsets.size - 1):
        start, end, row = offsets[document], offsets[document + 1], statistics[document]
        num_words = _read_words(buffer, start, end, classes, entries, scratch)
        _count_words(scratch, num_words, stop_words, row)
        if wanted & RUNS:
            grams, table = scratch.grams, scratch.table
            measure_repetition(scratch.hashes, scratch.num_chars, num_words, grams, table, row, LONGEST_TOP)
            _count_repeated_runs(scratch, num_words, row)
            _count_repeated_lines(buffer, start, end, classes, scratch, row)
        if wanted & LINE_ENDS:
            row[TERMINAL_LINES] = _count_terminal_lines(buffer, start, end, classes)
        if wanted & SENTENCES_OF_LINES:
            row[SENTENCES] = _count_sentences(buffer, start, end, classes, entries)


@bare_kernel
def _read_words(
    buffer: np.ndarray, at: int, end: int, classes: np.ndarray, entries: Entries, scratch: ScratchBuffers
) -> int:
    """Put the words of a document into the scratch buffers; returns their number."""
    num_words = 0
    while at < end:
        start, at, key, chars, _ = next_chunk(buffer, at, end, classes)
        if start == at:
            break
        number = entries.slots[find_slot(entries.slots, entries.keys, key)]
        if number < 0:  # letters, which are known to be a word
            scratch.hashes[num_words], scratch.num_chars[num_words], scratch.kinds[num_words] = key, chars, LETTERS
            num_words += 1
            continue
        for word in range(entries.begins[number], entries.begins[number + 1]):
            scratch.hashes[num_words] = entries.hashes[word]
            scratch.num_chars[num_words] = entries.num_chars[word]
            scratch.kinds[num_words] = entries.kinds[word]
            num_words += 1
    return num_words


@bare_kernel
def _count_words(scratch: ScratchBuffers, num_words: int, stop_words: np.ndarray, row: np.ndarray) -> None:
    flags = 0
    for word in range(num_words):
        kind = scratch.kinds[word]
        row[TOKENS] += 1
        row[TOKENS_WITH_LETTER] += (kind & HAS_LETTER) != 0
        if kind & IS_NO_SYMBOL:
            row[WORD_TOKENS] += 1
            row[WORD_TOKEN_CHARS] += scratch.num_chars[word]
        flags |= flag_of_word(stop_words, scratch.hashes[word])
    row[WORD_TOKEN_STOP_WORDS] = count_flags(flags)


@bare_kernel
def _count_repeated_runs(scratch: ScratchBuffers, num_words: int, row: np.ndarray) -> None:
    """Characters in repeated runs of each length. A run's hash grows by one word from length to length."""
    grams, table = scratch.grams, scratch.table
    grams.borders[0] = 0
    for word in range(num_words):
        grams.keys[word] = scratch.hashes[word]
        grams.borders[word + 1] = grams.borders[word] + scratch.num_chars[word]
    for length in range(2, LONGEST + 1):
        num_runs = num_words - length + 1
        for run in range(num_runs):
            last = run + length - 1
            grams.keys[run] = grams.keys[run] * _power(scratch.num_chars[last]) + scratch.hashes[last]
        if length >= DUPLICATE_LENGTHS[0] and num_runs > 0:
            row[DUPLICATE_5GRAM_CHARS + length - 5] = _chars_of_repeated(grams, num_runs, length, table)


@bare_kernel
def _chars_of_repeated(grams: Grams, num_runs: int, length: int, table: HashTable) -> int:
    generation, shift = start_use(table, num_runs)
    chars, run = 0, 0
    while run < num_runs:
        if find_first(table.slots, generation, shift, grams.keys, run) == run:
            run += 1
        else:
            chars += grams.borders[run + length] - grams.borders[run]
            run += length
    return chars


@bare_kernel
def _power(exponent: int) -> np.uint64:
    """BASE to a power."""
    result, base = np.uint64(1), BASE
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@bare_kernel
def _count_repeated_lines(
    buffer: np.ndarray,
    start: int,
    end: int,
    classes: np.ndarray,
    scratch: ScratchBuffers,
    row: np.ndarray,
) -> None:
    """Lines, blank ones too, and paragraphs, of the text without the blanks at its ends."""
    table = scratch.table
    num_lines = _part(buffer, start, end, ANY_RUN, scratch)
    found = count_duplicates(scratch.hashes, scratch.num_chars, num_lines, table)
    row[SPLIT_LINES] = num_lines
    row[DUPLICATE_SPLIT_LINES], row[DUPLICATE_SPLIT_LINE_CHARS] = found
    while start < end:
        point, after = decode(buffer, start)
        if not classes[point] & BLANK:
            break
        start = after
    while start < end:
        last = start_of_last(buffer, end)
        if not classes[decode(buffer, last)[0]] & BLANK:
            break
        end = last
    num_paragraphs = _part(buffer, start, end, LONG_RUN, scratch)
    found = count_duplicates(scratch.hashes, scratch.num_chars, num_paragraphs, table)
    row[PARAGRAPHS] = num_paragraphs
    row[DUPLICATE_PARAGRAPHS], row[DUPLICATE_PARAGRAPH_CHARS] = found


@bare_kernel
def _part(buffer: np.ndarray, at: int, end: int, least: int, scratch: ScratchBuffers) -> int:
    """Put hash and length of what stands between runs of at least so many line ends into the scratch buffers."""
    pieces, hashed, chars = 0, np.uint64(0), 0
    while at < end:
        newlines = 0
        while at < end and buffer[at] == NEWLINE:
            newlines += 1
            at += 1
        if newlines >= least:
            scratch.hashes[pieces], scratch.num_chars[pieces] = hashed, chars
            pieces, hashed, chars = pieces + 1, np.uint64(0), 0
        else:
            for _ in range(newlines):
                hashed = hashed * BASE + np.uint64(NEWLINE + 1)
                chars += 1
        if at < end:
            point, at = decode(buffer, at)
            hashed = hashed * BASE + np.uint64(point + 1)
            chars += 1
    scratch.hashes[pieces], scratch.num_chars[pieces] = hashed, chars
    return pieces + 1


@bare_kernel
def _count_terminal_lines(buffer: np.ndarray, start: int, end: int, classes: np.ndarray) -> int:
    """Lines with anything but blanks that end in a terminal character, and not in a blank behind it."""
    count, last, is_filled = 0, 0, False
    at = start
    while at < end:
        point, at = decode(buffer, at)
        if point == NEWLINE:
            count += is_filled and (last & TERMINAL) != 0
            last, is_filled = 0, False
        else:
            last = classes[point]
            is_filled |= (last & BLANK) == 0
    return count + (is_filled and (last & TERMINAL) != 0)


@bare_kernel
def _count_sentences(buffer: np.ndarray, at: int, end: int, classes: np.ndarray, entries: Entries) -> int:
    """Sentences of all lines: one begins behind an end mark with the first word that is no punctuation."""
    sentences = 0
    while at < end:
        stop = at
        while stop < end and buffer[stop] != NEWLINE:
            stop += 1
        sentences += _sentences_of_line(buffer, at, stop, classes, entries)
        at = stop + 1
    return sentences


@bare_kernel
def _sentences_of_line(buffer: np.ndarray, at: int, stop: int, classes: np.ndarray, entries: Entries) -> int:
    """In spaCy a run of blanks is a word too, but for the one blank behind a word."""
    sentences, has_ended, is_first = 1, False, True
    while at < stop:
        start, after, key, _, _ = next_chunk(buffer, at, stop, classes)
        blanks = start - at - (not is_first and start > at and buffer[at] == SPACE)
        if blanks > 0 and has_ended:
            sentences, has_ended = sentences + 1, False
        number = entries.slots[find_slot(entries.slots, entries.keys, key)] if after > start else np.int32(-1)
        first, last = (entries.begins[number], entries.begins[number + 1]) if number >= 0 else (0, 0)
        if after > start and number < 0 and has_ended:  # letters
            sentences, has_ended = sentences + 1, False
        for word in range(first, last):
            kind = entries.kinds[word]
            if has_ended and not kind & (IS_PUNCTUATION | ENDS_SENTENCE):
                sentences, has_ended = sentences + 1, False
            elif kind & ENDS_SENTENCE:
                has_ended = True
        at, is_first = after, False
    return sentences
