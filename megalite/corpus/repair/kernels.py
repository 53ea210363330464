"""Which documents need a repair, and the repair itself, over bytes.

    scan     a table gives each byte a class; ordinary ones (letters, digits, blanks, most of what is not ASCII)
             cost one look-up. The rest is judged where it stands:
                 \\n        a blank before it? three more of them before it?
                 \\r, \\x07  never stays
                 C2 E2 EF  a control, a line end or a character without width, perhaps
                 others    a letter; its code asks the table of combining marks
    rewrite  only the documents that the scan named. Characters go to the output one by one; at a line end the
             output steps back over the blanks it has just written.

Both are linear: a byte is written once and taken back once at most. What they do is defined by the four regular
expressions in the tests, and nothing else.

This module needs numba at import; import it where a station begins.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.repair.normal_form import END_OF_MARKS, FIRST_MARK, UNSTABLE
from megalite.kernel import kernel

UNTIDY = np.uint8(1)
"""Flag of a document: rewrite it."""

UNCOMPOSED = np.uint8(2)
"""Flag of a document: it failed the quick check of NFC."""

MAX_LINE_ENDS = 3
"""At most two empty lines on end."""

PLAIN, LINE_FEED, CARRIAGE_RETURN, CONTROL, LEAD = range(5)

KEEP, REMOVE, END_LINE = range(3)


def _byte_classes() -> np.ndarray:
    classes = np.full(256, PLAIN, np.uint8)
    classes[:0x20] = CONTROL
    classes[0x7F] = CONTROL
    classes[ord("\t")] = PLAIN
    classes[ord("\n")] = LINE_FEED
    classes[ord("\r")] = CARRIAGE_RETURN
    classes[0xC2:] = LEAD
    return classes


BYTE_CLASSES = _byte_classes()


@kernel
def scan(buffer: np.ndarray, offsets: np.ndarray, marks: np.ndarray, check_form: bool) -> np.ndarray:
    """Mark the documents that need anything.

    Args:
        buffer: uint8 [bytes].
        offsets: int64 [documents + 1].
        marks: uint8 [END_OF_MARKS], see `normal_form`.
        check_form: whether to look for UNCOMPOSED.

    Returns:
        uint8 [documents], UNTIDY and UNCOMPOSED or-ed.
    """
    flags = np.zeros(offsets.size - 1, np.uint8)
    for document in range(flags.size):
        start, end = offsets[document], offsets[document + 1]
        flag = np.uint8(0)
        if end > start and (buffer[start] == 10 or buffer[end - 1] == 10 or _ends_blank(buffer, start, end)):
            flag |= UNTIDY
        mark_end, mark_class = start - 1, np.uint8(0)  # where the last combining mark ended, and its class
        place = start
        while place < end:
            kind = BYTE_CLASSES[buffer[place]]
            if kind == PLAIN:
                place += 1
                continue
            if kind == LINE_FEED:
                if _ends_blank(buffer, start, place) or _count_line_feeds(buffer, start, place) == MAX_LINE_ENDS:
                    flag |= UNTIDY
                place += 1
                continue
            if kind != LEAD:
                flag |= UNTIDY
                if kind == CONTROL and mark_end == place:  # it will be gone, and marks on its two sides be neighbours
                    mark_end += 1
                place += 1
                continue
            fate, size = _fate_at(buffer, place)
            if fate != KEEP:
                flag |= UNTIDY
                if fate == REMOVE and mark_end == place:
                    mark_end += size
            elif check_form:
                code = _code(buffer, place, size)
                mark = marks[code] if FIRST_MARK <= code < END_OF_MARKS else np.uint8(0)
                if mark != 0:
                    if mark == UNSTABLE or (mark_end == place and mark_class > mark):
                        flag |= UNCOMPOSED
                    mark_end, mark_class = place + size, mark
            place += size
        flags[document] = flag
    return flags


@kernel
def rewrite(buffer: np.ndarray, offsets: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tidy the documents that have the flag UNTIDY, and copy the others.

    Returns:
        The new buffer and its offsets.
    """
    out = np.empty(offsets[-1] - offsets[0], np.uint8)
    out_offsets = np.zeros(offsets.size, np.int64)
    filled = 0
    for document in range(flags.size):
        start, end = offsets[document], offsets[document + 1]
        if flags[document] & UNTIDY:
            filled = _rewrite_one(buffer, start, end, out, filled)
        else:
            out[filled : filled + end - start] = buffer[start:end]
            filled += end - start
        out_offsets[document + 1] = filled
    return out[:filled], out_offsets


@kernel
def _rewrite_one(buffer: np.ndarray, start: int, end: int, out: np.ndarray, first: int) -> int:
    """Write a tidy document from out[first] on; returns where it ends."""
    filled = first
    place = start
    while place < end:
        kind = BYTE_CLASSES[buffer[place]]
        if kind == PLAIN:
            out[filled] = buffer[place]
            filled += 1
            place += 1
            continue
        fate, size = REMOVE, 1
        if kind == LEAD:
            fate, size = _fate_at(buffer, place)
        elif kind == LINE_FEED:
            fate = END_LINE
        elif kind == CARRIAGE_RETURN:
            fate = END_LINE
            if place + 1 < end and buffer[place + 1] == 10:
                size = 2
        if fate == END_LINE:
            filled = _trim(out, first, filled)
            if filled > first and _count_line_feeds(out, first, filled) < MAX_LINE_ENDS:
                out[filled] = 10
                filled += 1
        elif fate == KEEP:
            out[filled : filled + size] = buffer[place : place + size]
            filled += size
        place += size
    filled = _trim(out, first, filled)
    while filled > first and out[filled - 1] == 10:
        filled -= 1
    return filled


@kernel
def _fate_at(buffer: np.ndarray, place: int) -> tuple[int, int]:
    """What becomes of the character of several bytes at a place, and how many bytes it has."""
    lead = buffer[place]
    if lead < 0xE0:
        if lead == 0xC2 and buffer[place + 1] < 0xA0:  # U+0080 to U+009F, of which U+0085 is a line end
            return (END_LINE if buffer[place + 1] == 0x85 else REMOVE), 2
        return KEEP, 2
    if lead >= 0xF0:
        return KEEP, 4
    second, third = buffer[place + 1], buffer[place + 2]
    if lead == 0xE2 and second == 0x80:
        if third == 0xA8 or third == 0xA9:  # U+2028, U+2029
            return END_LINE, 3
        if third == 0x8B:  # U+200B
            return REMOVE, 3
    elif (lead == 0xE2 and second == 0x81 and third == 0xA0) or (  # U+2060
        lead == 0xEF and ((second == 0xBB and third == 0xBF) or (second == 0xBF and 0xB9 <= third <= 0xBC))
    ):  # U+FEFF, U+FFF9 to U+FFFC
        return REMOVE, 3
    return KEEP, 3


@kernel
def _code(buffer: np.ndarray, place: int, size: int) -> int:
    """The number of the character at a place, which has `size` bytes."""
    code = np.int64(buffer[place]) & (0x7F >> size)
    for offset in range(1, size):
        code = (code << 6) | (np.int64(buffer[place + offset]) & 0x3F)
    return code


@kernel
def _ends_blank(buffer: np.ndarray, start: int, end: int) -> bool:
    """Whether buffer[start:end] ends in a blank, a tab or a no-break space."""
    if end == start:
        return False
    last = buffer[end - 1]
    return last == 32 or last == 9 or (last == 0xA0 and end - 2 >= start and buffer[end - 2] == 0xC2)


@kernel
def _trim(buffer: np.ndarray, start: int, end: int) -> int:
    """Where buffer[start:end] ends without its last blanks."""
    while _ends_blank(buffer, start, end):
        end -= 2 if buffer[end - 1] == 0xA0 else 1
    return end


@kernel
def _count_line_feeds(buffer: np.ndarray, start: int, end: int) -> int:
    """Line feeds at the end of buffer[start:end], up to MAX_LINE_ENDS."""
    count = 0
    while count < MAX_LINE_ENDS and end - 1 - count >= start and buffer[end - 1 - count] == 10:
        count += 1
    return count
