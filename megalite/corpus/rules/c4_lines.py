"""C4's work on lines, compiled: write each as it shall be, look at what was written, and take it back if it fails.

    line -> strip -> ends a sentence? enough words? -> write without citations -> read: phrases? -> keep | take back
                     (cheap tests first: most lines of a web page fail here)

Lines that fail are dropped whatever else is in them, so the order of tests among these does not matter; but "lorem
ipsum" counts only in a line that no earlier test dropped, and "{" only in one without "javascript", as in C4's code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.corpus.rules.characters import BLANK, DIGIT, TERMINAL, decode, start_of_last
from megalite.corpus.rules.columns import CURLY_BRACKET_LINES, LOREM_IPSUM_LINES, SENTENCES
from megalite.corpus.rules.phrases import Phrases
from megalite.kernel import bare_kernel

LOREM_IPSUM, JAVASCRIPT, POLICY = 1, 2, 4
"""Groups of phrases."""

NEWLINE, SPACE, TAB, OPENING, CLOSING, DOT = 0x0A, 0x20, 0x09, 0x5B, 0x5D, 0x2E

EDIT, CITATION_NEEDED = (np.frombuffer(note, np.uint8) for note in (b"[edit]", b"[citation needed]"))

PLAIN, END, BRACKET, LEAD = range(4)
FULL_WIDTH_END_MARKS = (0x3002, 0xFF01, 0xFF1F)
"""The ends of sentences of Chinese and Japanese, where no blank follows. Their bytes begin with E3 and EF."""
CLOSERS = (0x22, 0x27, 0x29, 0x5D, 0x7D, 0xBB, 0x2019, 0x201D)
"""Quotes and brackets that may stand between the mark and the blank."""


def _marks() -> np.ndarray:
    """What each byte may be: END for a full stop, exclamation or question mark, which ends a sentence when a blank
    follows, or the line ends."""
    marks = np.full(256, PLAIN, np.uint8)
    marks[[ord(mark) for mark in ".!?"]] = END
    marks[ord("{")] = BRACKET
    marks[[0xE3, 0xEF]] = LEAD
    return marks


MARKS = _marks()


class LineRules(NamedTuple):
    """Settings of the kernel; 0 turns a number off."""

    classes: np.ndarray
    phrases: Phrases
    terminal: bool
    min_words: int
    max_word_length: int
    citations: bool
    keeps_blanks: bool
    """Those beside a citation that was cut stay in their line, but not at the ends of the text: as datatrove has it."""


class RawLine(NamedTuple):
    """A line of a text, without the blanks at its ends."""

    begin: int
    stop: int
    has_opening: bool
    """Whether a bracket of a citation may begin in it."""


@bare_kernel
def edit_documents(
    buffer: np.ndarray,
    offsets: np.ndarray,
    rules: LineRules,
    out: np.ndarray,
    written: np.ndarray,
    new_offsets: np.ndarray,
    statistics: np.ndarray,
) -> None:
    """Write all documents anew.

    Args:
        buffer: uint8, the texts.
        offsets: int64 [documents + 1].
        rules: what to keep.
        out: uint8 with room for as many bytes as the texts have.
        written: the same memory, to read what was written: what reads is compiled for one type.
        new_offsets: int64 [documents + 1], of the texts in `out`.
        statistics: int64 [documents, columns], whose columns of C4 are filled.
    """
    new_offsets[0] = 0
    for document in range(offsets.size - 1):
        start = new_offsets[document]
        at, end = offsets[document], offsets[document + 1]
        to, row = start, statistics[document]
        while at <= end:
            stop, has_opening = at, False
            while stop < end and buffer[stop] != NEWLINE:
                has_opening |= buffer[stop] == OPENING
                stop += 1
            begin = _skip_blanks(buffer, at, stop, rules.classes)
            last = _drop_blanks(buffer, begin, stop, rules.classes)
            at = stop + 1
            if _may_stay(buffer, begin, last, has_opening, rules):
                to = _add_line(buffer, RawLine(begin, last, has_opening), rules, out, written, start, to, row)
        if rules.keeps_blanks:
            to = _drop_blanks(written, start, to, rules.classes)
        while to > start and written[to - 1] == NEWLINE:
            to -= 1
        new_offsets[document + 1] = to


@bare_kernel
def _may_stay(buffer: np.ndarray, begin: int, stop: int, has_opening: bool, rules: LineRules) -> bool:
    """The tests that need no look at what is written; a line that ends in "]" may end a sentence without it."""
    classes = rules.classes
    may_be_cut = rules.citations and has_opening and stop > begin and buffer[stop - 1] == CLOSING
    if rules.terminal and not may_be_cut and not _ends_a_sentence(buffer, begin, stop, classes):
        return False
    if not _has_words(buffer, begin, stop, rules.min_words, classes):
        return False
    return not _has_long_word(buffer, begin, stop, rules.max_word_length, classes)


@bare_kernel
def _add_line(
    buffer: np.ndarray,
    raw: RawLine,
    rules: LineRules,
    out: np.ndarray,
    written: np.ndarray,
    start: int,
    to: int,
    row: np.ndarray,
) -> int:
    """Write a line behind a "\\n", and look whether it stays; returns the new end of the document."""
    begin, stop = raw.begin, raw.stop
    line = to + (to > start)
    if rules.citations and raw.has_opening:
        end = _write_without_citations(buffer, begin, stop, rules.classes, out, line)
        if end < line + stop - begin and not rules.keeps_blanks:
            end = _drop_blanks(written, line, end, rules.classes)
        if rules.keeps_blanks and line == start:
            end = _drop_blanks_before(written, out, line, end, rules.classes)
        if rules.terminal and not _ends_a_sentence(written, line, end, rules.classes):
            return to
    else:
        end = line + stop - begin
        for offset in range(stop - begin):
            out[line + offset] = buffer[begin + offset]
    groups, sentences, has_bracket = _read(written, line, end, rules.phrases)
    if groups & LOREM_IPSUM:
        row[LOREM_IPSUM_LINES] += 1
    if groups & JAVASCRIPT:
        return to
    row[CURLY_BRACKET_LINES] += has_bracket
    if groups & POLICY or (line == start and end == line):  # an empty line has no place at the top
        return to
    row[SENTENCES] += max(sentences, end > line)
    if line > to:
        out[to] = NEWLINE
    return end


@bare_kernel
def _drop_blanks_before(written: np.ndarray, out: np.ndarray, begin: int, end: int, classes: np.ndarray) -> int:
    """Move a line to its beginning, over the blanks there; returns its new end."""
    skipped = _skip_blanks(written, begin, end, classes) - begin
    for at in range(begin, end - skipped):
        out[at] = written[at + skipped]
    return end - skipped


@bare_kernel
def _write_without_citations(
    buffer: np.ndarray, at: int, stop: int, classes: np.ndarray, out: np.ndarray, to: int
) -> int:
    """Copy a line without its citations; returns the end of the copy."""
    while at < stop:
        if buffer[at] == OPENING:
            behind = _end_of_citation(buffer, at, stop, classes)
            if behind > at:
                at = behind
                continue
        out[to] = buffer[at]
        at, to = at + 1, to + 1
    return to


@bare_kernel
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


@bare_kernel
def _ends_a_sentence(buffer: np.ndarray, begin: int, stop: int, classes: np.ndarray) -> bool:
    """Whether a line ends in a terminal character and not in "..."."""
    if stop == begin or not classes[decode(buffer, start_of_last(buffer, stop))[0]] & TERMINAL:
        return False
    return stop - begin < 3 or not (buffer[stop - 1] == DOT and buffer[stop - 2] == DOT and buffer[stop - 3] == DOT)


@bare_kernel
def _has_words(buffer: np.ndarray, at: int, stop: int, least: int, classes: np.ndarray) -> bool:
    """Whether there are so many chunks between blanks; reads no further than it must."""
    words, was_blank = 0, 1
    while words < least and at < stop:
        point, at = decode(buffer, at)
        is_blank = classes[point] & BLANK
        words += was_blank & ~is_blank  # a branch here would be guessed wrong at every second word
        was_blank = is_blank
    return words >= least


@bare_kernel
def _has_long_word(buffer: np.ndarray, at: int, stop: int, most: int, classes: np.ndarray) -> bool:
    """Whether a chunk has more characters than `most`; a line of no more bytes is not read."""
    length = 0
    while most > 0 and stop - at + length > most:
        point, at = decode(buffer, at)
        length = 0 if classes[point] & BLANK else length + 1
        if length > most:
            return True
    return False


@bare_kernel
def _read(text: np.ndarray, at: int, stop: int, phrases: Phrases) -> tuple[int, int, bool]:
    """Groups of the phrases in a line, its ends of sentences, and whether it has a curly bracket."""
    columns, steps, phrase_groups = phrases.columns, phrases.steps, phrases.groups
    state, first_end = np.uint64(0), np.uint64(phrases.first_end)
    groups, sentences, has_bracket = 0, 0, False
    while at < stop:
        byte = text[at]
        at += 1
        state = np.uint64(steps[state + columns[byte]])
        if state >= first_end:
            groups |= phrase_groups[np.int64(state) // phrases.num_columns]
        mark = MARKS[byte]
        if mark == PLAIN:
            continue
        if mark == END:
            sentences += _ends_behind(text, at, stop)
        elif mark == BRACKET:
            has_bracket = True
        else:
            sentences += decode(text, at - 1)[0] in FULL_WIDTH_END_MARKS
    return groups, sentences, has_bracket


@bare_kernel
def _ends_behind(text: np.ndarray, at: int, stop: int) -> bool:
    """Whether a blank or the line's end follows, behind quotes and brackets."""
    while at < stop:
        point, after = decode(text, at)
        if point not in CLOSERS:
            return point in (SPACE, TAB)
        at = after
    return True


@bare_kernel
def _skip_blanks(buffer: np.ndarray, begin: int, stop: int, classes: np.ndarray) -> int:
    """Where the line begins without the blanks at its beginning."""
    while begin < stop:
        point, after = decode(buffer, begin)
        if not classes[point] & BLANK:
            break
        begin = after
    return begin


@bare_kernel
def _drop_blanks(buffer: np.ndarray, begin: int, stop: int, classes: np.ndarray) -> int:
    """Where the line ends without the blanks at its end."""
    while begin < stop:
        last = start_of_last(buffer, stop)
        if not classes[decode(buffer, last)[0]] & BLANK:
            break
        stop = last
    return stop
