"""The measures that the rules for source code compare, compiled: lines, letters, marks, visible text.

A page of HTML is a document whose first 1,000 bytes hold `<!doctype html` or `<html`, in any case of letters, with
nothing but blanks, comments and declarations before it. Its visible text is read by a machine of four states:

    text --<--> tag --> text        text --<!----> comment ----->--> text
    text --<script, <style--> tag --> hidden --</script, </style--> tag
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.rules.characters import BLANK, LETTER, decode
from megalite.corpus.rules.columns import (
    CODE_LINES,
    ENCODED_CHARS,
    GENERATED_MARKS,
    HTML_CHARS,
    IS_HTML,
    LETTERS,
    LONGEST_ENCODED_CHARS,
    LONGEST_LINE_CHARS,
    VISIBLE_CHARS,
    XML_DECLARATIONS,
)
from megalite.corpus.rules.encoded import count_encoded
from megalite.corpus.rules.phrases import Phrases, count_phrases
from megalite.kernel import bare_kernel

XML_CHARS = 100
"""Characters in which the XML declaration must stand."""

HTML_BYTES = 1000

NEWLINE, LESS, GREATER = 0x0A, 0x3C, 0x3E

XML, DOCTYPE, HTML, COMMENT, COMMENT_END, SCRIPT, STYLE, SCRIPT_END, STYLE_END = (
    np.frombuffer(word, np.uint8)
    for word in (
        b"<?xml version=",
        b"<!doctype html",
        b"<html",
        b"<!--",
        b"-->",
        b"<script",
        b"<style",
        b"</script",
        b"</style",
    )
)
"""In small letters."""


@bare_kernel
def measure_documents(
    buffer: np.ndarray,
    offsets: np.ndarray,
    classes: np.ndarray,
    marks: Phrases,
    mark_lines: int,
    statistics: np.ndarray,
) -> None:
    """Fill these columns of all documents.

    Args:
        buffer: uint8, valid UTF-8 between the offsets.
        offsets: int64 [documents + 1].
        classes: `character_classes`.
        marks: what generated files say.
        mark_lines: in this many lines from the beginning.
        statistics: int64 [documents, columns].
    """
    for document in range(offsets.size - 1):
        start, end, row = offsets[document], offsets[document + 1], statistics[document]
        head = _measure_lines(buffer, start, end, classes, mark_lines, row)
        row[GENERATED_MARKS] = count_phrases(buffer, start, head, marks, classes, False)
        row[ENCODED_CHARS], row[LONGEST_ENCODED_CHARS] = count_encoded(buffer, start, end)
        if _is_html(buffer, start, end, classes):
            row[IS_HTML] = 1
            row[HTML_CHARS], row[VISIBLE_CHARS] = _count_visible(buffer, start, end, classes)


@bare_kernel
def _measure_lines(
    buffer: np.ndarray, start: int, end: int, classes: np.ndarray, mark_lines: int, row: np.ndarray
) -> int:
    """Count letters, lines and the longest of them; returns where the first `mark_lines` lines end."""
    at, head, chars, chars_before, lines = start, end, 0, 0, 0
    while at < end:
        if chars_before <= XML_CHARS - XML.size and _begins(buffer, at, end, XML):
            row[XML_DECLARATIONS] = 1
        point, at = decode(buffer, at)
        chars_before += 1
        if point == NEWLINE:
            row[LONGEST_LINE_CHARS] = max(row[LONGEST_LINE_CHARS], chars)
            chars = 0
            lines += 1
            if lines == mark_lines:
                head = at
        else:
            row[LETTERS] += (classes[point] & LETTER) != 0
            chars += 1
    row[LONGEST_LINE_CHARS] = max(row[LONGEST_LINE_CHARS], chars)
    row[CODE_LINES] = lines + (chars > 0)
    return head


@bare_kernel
def _begins(buffer: np.ndarray, at: int, end: int, word: np.ndarray) -> bool:
    """Whether a word stands here, in any case of letters."""
    if at + word.size > end or buffer[at] != word[0]:
        return False
    for number in range(1, word.size):
        byte = buffer[at + number]
        if byte != word[number] and (not 65 <= byte <= 90 or byte + 32 != word[number]):
            return False
    return True


@bare_kernel
def _find(buffer: np.ndarray, at: int, end: int, word: np.ndarray) -> int:
    """Where a word begins next; `end` if it does not."""
    while at < end and not _begins(buffer, at, end, word):
        at += 1
    return at


@bare_kernel
def _behind_tag(buffer: np.ndarray, at: int, end: int) -> int:
    """Behind the next ">"."""
    while at < end and buffer[at] != GREATER:
        at += 1
    return min(at + 1, end)


@bare_kernel
def _is_html(buffer: np.ndarray, start: int, end: int, classes: np.ndarray) -> bool:
    at, last = start, min(end, start + HTML_BYTES)
    while at < last:
        if buffer[at] == LESS:
            if _begins(buffer, at, end, DOCTYPE) or _begins(buffer, at, end, HTML):
                return True
            if _begins(buffer, at, end, COMMENT):
                at = min(_find(buffer, at + COMMENT.size, last, COMMENT_END) + COMMENT_END.size, last)
            elif at + 1 < end and buffer[at + 1] in (0x21, 0x3F):  # ! ?
                at = _behind_tag(buffer, at, last)
            else:
                return False
            continue
        point, at = decode(buffer, at)
        if not classes[point] & BLANK and point != 0xFEFF:
            return False
    return False


@bare_kernel
def _count_visible(buffer: np.ndarray, at: int, end: int, classes: np.ndarray) -> tuple[int, int]:
    """Characters of a page, and those that a reader sees: a run of blanks is one, at the ends of the page none."""
    chars, visible, waiting = 0, 0, False
    for place in range(at, end):
        chars += buffer[place] & 0xC0 != 0x80
    while at < end:
        if buffer[at] == LESS:
            hides = _begins(buffer, at, end, SCRIPT)
            if hides or _begins(buffer, at, end, STYLE):
                at = _find(buffer, _behind_tag(buffer, at, end), end, SCRIPT_END if hides else STYLE_END)
                at = _behind_tag(buffer, at, end)
            elif _begins(buffer, at, end, COMMENT):
                at = min(_find(buffer, at + COMMENT.size, end, COMMENT_END) + COMMENT_END.size, end)
            else:
                at = _behind_tag(buffer, at, end)
            continue
        point, at = decode(buffer, at)
        if classes[point] & BLANK:
            waiting = visible > 0
        else:
            visible += 1 + waiting
            waiting = False
    return chars, visible
