"""C4's work on lines, compiled: write each as it shall be, look at what was written, and take it back if it fails.

    line -> strip -> ends a sentence? enough words? -> write without citations -> phrases? -> keep | take back
                     (cheap tests first: most lines of a web page fail here)

Lines that fail are dropped whatever else is in them, so the order of tests among these does not matter; but "lorem
ipsum" counts only in a line that no earlier test dropped, and "{" only in one without "javascript", as in C4's code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.data.rules.characters import BLANK, DIGIT, TERMINAL, decode, start_of_last
from megalite.data.rules.columns import CURLY_BRACKET_LINES, LOREM_IPSUM_LINES, SENTENCES
from megalite.data.rules.kernel import kernel
from megalite.data.rules.phrases import Phrases

LOREM_IPSUM, JAVASCRIPT, POLICY, CITATION = 1, 2, 4, 8
"""Groups of phrases."""

NEWLINE, SPACE, TAB, CURLY_BRACKET, OPENING, CLOSING, DOT = 0x0A, 0x20, 0x09, 0x7B, 0x5B, 0x5D, 0x2E

EDIT, CITATION_NEEDED = (np.frombuffer(note, np.uint8) for note in (b"[edit]", b"[citation needed]"))

END_MARKS = (0x2E, 0x21, 0x3F)
"""Full stop, exclamation and question mark: the end of a sentence when a blank follows, or the line ends."""
FULL_WIDTH_END_MARKS = (0x3002, 0xFF01, 0xFF1F)
"""The same of Chinese and Japanese, where no blank follows."""
CLOSERS = (0x22, 0x27, 0x29, 0x5D, 0x7D, 0xBB, 0x2019, 0x201D)
"""Quotes and brackets that may stand between the mark and the blank."""


class LineRules(NamedTuple):
    """Settings of the kernel; 0 turns a number off."""

    classes: np.ndarray
    phrases: Phrases
    terminal: bool
    min_words: int
    max_word_length: int
    citations: bool


@kernel
def edit_documents(
    buffer: np.ndarray,
    offsets: np.ndarray,
    rules: LineRules,
    out: np.ndarray,
    new_offsets: np.ndarray,
    statistics: np.ndarray,
) -> None:
    """Write all documents anew.

    Args:
        buffer: uint8, the texts.
        offsets: int64 [documents + 1].
        rules: what to keep.
        out: uint8 with room for as many bytes as the texts have.
        new_offsets: int64 [documents + 1], of the texts in `out`.
        statistics: int64 [documents, columns], whose columns of C4 are filled.
    """
    new_offsets[0] = 0
    for document in range(offsets.size - 1):
        start = new_offsets[document]
        at, end = offsets[document], offsets[document + 1]
        to = start
        while at <= end:
            stop = at
            while stop < end and buffer[stop] != NEWLINE:
                stop += 1
            to = _edit_line(buffer, at, stop, rules, out, start, to, statistics[document])
            at = stop + 1
        while to > start and out[to - 1] == NEWLINE:
            to -= 1
        new_offsets[document + 1] = to


@kernel
def _edit_line(
    buffer: np.ndarray,
    begin: int,
    stop: int,
    rules: LineRules,
    out: np.ndarray,
    start: int,
    to: int,
    row: np.ndarray,
) -> int:
    """Append a line behind a "\\n" if it is kept; returns the new end of the document."""
    begin = _skip_blanks(buffer, begin, stop, rules.classes)
    stop = _drop_blanks(buffer, begin, stop, rules.classes)
    may_be_cut = rules.citations and stop > begin and buffer[stop - 1] == CLOSING
    if rules.terminal and not may_be_cut and not _ends_a_sentence(buffer, begin, stop, rules.classes):
        return to
    if not _has_words(buffer, begin, stop, rules.min_words, rules.classes):
        return to
    if _has_long_word(buffer, begin, stop, rules.max_word_length, rules.classes):
        return to
    line = to + (to > start)
    line_end, groups = _write(buffer, begin, stop, rules, out, line)
    if groups & CITATION:
        line_end = _drop_blanks(out, line, line_end, rules.classes)
    if rules.terminal and may_be_cut and not _ends_a_sentence(out, line, line_end, rules.classes):
        return to
    if groups & LOREM_IPSUM:
        row[LOREM_IPSUM_LINES] += 1
    if groups & JAVASCRIPT:
        return to
    sentences, brackets = _count_marks(out, line, line_end)
    row[CURLY_BRACKET_LINES] += brackets > 0
    if groups & POLICY:
        return to
    if line == start and line_end == line:
        return to  # an empty line has no place at the top
    row[SENTENCES] += max(sentences, line_end > line)
    if line > to:
        out[to] = NEWLINE
    return line_end


@kernel
def _write(buffer: np.ndarray, at: int, stop: int, rules: LineRules, out: np.ndarray, to: int) -> tuple[int, int]:
    """Copy a line without its citations; returns its end, and the groups of phrases in what was written."""
    steps, columns, phrase_groups = rules.phrases.steps, rules.phrases.columns, rules.phrases.groups
    groups, state = 0, 0
    while at < stop:
        byte = buffer[at]
        if byte == OPENING and rules.citations:
            behind = _end_of_citation(buffer, at, stop, rules.classes)
            if behind > at:
                groups |= CITATION
                at = behind
                continue
        state = steps[state, columns[byte]]
        groups |= phrase_groups[state]
        out[to] = byte
        at, to = at + 1, to + 1
    return to, groups


@kernel
def _end_of_citation(buffer: np.ndarray, at: int, stop: int, classes: np.ndarray) -> int:
    """Where the citation that begins at "[" ends, or `at` if none does."""
    for note in (EDIT, CITATION_NEEDED):
        if stop - at >= note.size:
            same = 0
            while same < note.size and buffer[at + same] == note[same]:
                same += 1
            if same == note.size:
                return at + same
    behind = at + 1
    while behind < stop:
        point, after = decode(buffer, behind)
        if not classes[point] & DIGIT:
            break
        behind = after
    return behind + 1 if behind < stop and buffer[behind] == CLOSING else at


@kernel
def _ends_a_sentence(buffer: np.ndarray, begin: int, stop: int, classes: np.ndarray) -> bool:
    """Whether a line ends in a terminal character and not in "..."."""
    if stop == begin or not classes[decode(buffer, start_of_last(buffer, stop))[0]] & TERMINAL:
        return False
    return stop - begin < 3 or not (buffer[stop - 1] == DOT and buffer[stop - 2] == DOT and buffer[stop - 3] == DOT)


@kernel
def _has_words(buffer: np.ndarray, at: int, stop: int, least: int, classes: np.ndarray) -> bool:
    """Whether there are so many chunks between blanks; reads no further than it must."""
    in_word, words = False, 0
    while words < least and at < stop:
        point, at = decode(buffer, at)
        if classes[point] & BLANK:
            in_word = False
        elif not in_word:
            in_word = True
            words += 1
    return words >= least


@kernel
def _has_long_word(buffer: np.ndarray, at: int, stop: int, most: int, classes: np.ndarray) -> bool:
    """Whether a chunk has more characters than `most`; a line of no more bytes is not read."""
    length = 0
    while most > 0 and stop - at + length > most:
        point, at = decode(buffer, at)
        length = 0 if classes[point] & BLANK else length + 1
        if length > most:
            return True
    return False


@kernel
def _count_marks(buffer: np.ndarray, at: int, stop: int) -> tuple[int, int]:
    """Ends of sentences, and curly brackets."""
    sentences, brackets = 0, 0
    while at < stop:
        byte = buffer[at]
        at += 1
        if byte in END_MARKS:
            behind = at
            while behind < stop:
                point, after = decode(buffer, behind)
                if point not in CLOSERS:
                    break
                behind = after
            sentences += behind == stop or buffer[behind] == SPACE or buffer[behind] == TAB
        elif byte == CURLY_BRACKET:
            brackets += 1
        elif byte >= 0xE3:
            sentences += decode(buffer, at - 1)[0] in FULL_WIDTH_END_MARKS
    return sentences, brackets


@kernel
def _skip_blanks(buffer: np.ndarray, begin: int, stop: int, classes: np.ndarray) -> int:
    """Where the line begins without the blanks at its beginning."""
    while begin < stop:
        point, after = decode(buffer, begin)
        if not classes[point] & BLANK:
            break
        begin = after
    return begin


@kernel
def _drop_blanks(buffer: np.ndarray, begin: int, stop: int, classes: np.ndarray) -> int:
    """Where the line ends without the blanks at its end."""
    while begin < stop:
        last = start_of_last(buffer, stop)
        if not classes[decode(buffer, last)[0]] & BLANK:
            break
        stop = last
    return stop
