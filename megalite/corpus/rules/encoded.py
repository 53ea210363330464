r"""Runs of data written in letters, compiled: what a file holds instead of a program.

    base64        iVBORw0KGgoAAAANSUhEUgAA...    64 and more of A-Z a-z 0-9 + / = and line ends
    hexadecimal   0x7f, 0x45, 0x4c, ...          8 and more pairs of digits that stand by themselves, commas or blanks
                  \x7f\x45\x4c...                between them; or pairs with \x before each
    escapes       \u4e2d\u6587...                8 and more

The definitions are StarCoder2's (Lozhkov et al. 2024, 2.5), whose pattern for hexadecimal bytes does not see those with
both a comma and a blank between them, nor the first of a row of \x. Where two kinds could begin, the order is escapes,
hexadecimal, base64, and the search goes on behind what was found. No byte is looked at more than some ten times.
"""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel

MIN_BASE64_CHARS, MIN_HEX_BYTES, MIN_ESCAPES = 64, 8, 8

BASE64, HEX, IN_WORD, WHITESPACE = 1, 2, 4, 8
"""Flags of a byte."""

BACKSLASH, COMMA, ZERO, SMALL_X, SMALL_U = 0x5C, 0x2C, 0x30, 0x78, 0x75


def _byte_flags() -> np.ndarray:
    """uint8 [256]"""
    digits, letters = b"0123456789", b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    flags = np.zeros(256, np.uint8)
    for flag, members in (
        (BASE64, digits + letters + b"+/=\n"),
        (HEX, digits + b"abcdefABCDEF"),
        (IN_WORD, digits + letters + b"_" + bytes(range(0x80, 0x100))),
        (WHITESPACE, b" \t\n"),
    ):
        flags[[*members]] |= flag
    return flags


FLAGS = _byte_flags()


@bare_kernel
def count_encoded(buffer: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """Characters of all runs of encoded data between two bytes, and of the longest."""
    total, longest, at, run_end = 0, 0, start, start
    while at < end:
        flags = FLAGS[buffer[at]]
        found = at
        if buffer[at] == BACKSLASH:
            found = _end_of_escapes(buffer, at, end)
        if found == at and (buffer[at] == BACKSLASH or (flags & HEX and (at == start or _no_word(buffer[at - 1])))):
            found = _end_of_hex(buffer, at, end)
        if found == at and flags & BASE64:
            if at >= run_end:  # once for each run
                run_end = at + 1
                while run_end < end and FLAGS[buffer[run_end]] & BASE64:
                    run_end += 1
            if run_end - at >= MIN_BASE64_CHARS:
                found = run_end
        if found > at:
            total += found - at
            longest = max(longest, found - at)
            at = found
        else:
            at += 1
    return total, longest


@bare_kernel
def _no_word(byte: int) -> bool:
    return not FLAGS[byte] & IN_WORD


@bare_kernel
def _end_of_escapes(buffer: np.ndarray, at: int, end: int) -> int:
    r"""Where a row of \u escapes ends that begins here; `at` if there are too few."""
    start, count = at, 0
    while at + 6 <= end and buffer[at] == BACKSLASH and buffer[at + 1] == SMALL_U and _are_hex(buffer, at + 2, 4):
        at += 6
        count += 1
    return at if count >= MIN_ESCAPES else start


@bare_kernel
def _end_of_hex(buffer: np.ndarray, at: int, end: int) -> int:
    """Where a row of hexadecimal bytes ends that begins here; `at` if there are too few."""
    start, last, count = at, at, 0
    while True:
        if at + 4 <= end and buffer[at] == BACKSLASH and buffer[at + 1] == SMALL_X and _are_hex(buffer, at + 2, 2):
            at += 4
        else:
            if at + 4 <= end and buffer[at] == ZERO and buffer[at + 1] == SMALL_X:
                at += 2
            if at + 2 > end or not _are_hex(buffer, at, 2) or (at + 2 < end and FLAGS[buffer[at + 2]] & IN_WORD):
                break
            at += 2
        count += 1
        last = at
        while at < end and FLAGS[buffer[at]] & WHITESPACE:
            at += 1
        if at < end and buffer[at] == COMMA:
            at += 1
            while at < end and FLAGS[buffer[at]] & WHITESPACE:
                at += 1
    return last if count >= MIN_HEX_BYTES else start


@bare_kernel
def _are_hex(buffer: np.ndarray, at: int, count: int) -> bool:
    digits = 0
    for place in range(at, at + count):
        digits += (FLAGS[buffer[place]] & HEX) != 0
    return digits == count
