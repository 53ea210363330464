"""Whether a candidate is a telephone number, or a US social security number.

Numbers of telephones have no checksum, so only written forms are taken that little else has: a plus sign with a country
code that exists, or the groups and signs that a country's people use. Nothing is taken out of a longer number.
"""

from __future__ import annotations

import itertools
import re

from megalite.corpus.privacy.window import Span, Window

NOT_LONGER = rb"(?![0-9A-Za-z_]|[.,:/-][0-9])"
"""Behind a number: neither a word nor a further group."""

COUNTRY_CODE = (
    rb"(?:1|7|2[07]|2[1-689]\d|3[0-469]|3[578]\d|4[013-9]|42\d|5[1-8]|5[09]\d|6[0-6]|6[7-9]\d|8[1246]|8[0578]\d"
    rb"|9[0-58]|9[67]\d|99[2-68])"
)
"""ITU-T E.164, annex: every code that is given out."""

INTERNATIONAL = re.compile(
    rb"\+%b[ .-]?(?:\(\d{1,5}\)[ .-]?)?(?:\d{3,45}(?:[ .-]\d{2,40}){0,5}|\d{1,2}(?:[ .-]\d{2,40}){1,5})%b"
    % (COUNTRY_CODE, NOT_LONGER)
)
"""Groups of digits with signs between them: no two ways to read one number, which would be tried one after the other.
Groups may be longer than those of a number, so that a number is never taken out of a row of digits."""

MIN_DIGITS, MAX_DIGITS = 8, 15
"""Of an international number, the country code included."""

MIN_UNBROKEN_DIGITS, MAX_UNBROKEN_DIGITS = 10, 13
"""Without any sign between the digits: shorter ones may be anything that is added, longer ones are times and ids."""

NORTH_AMERICA = re.compile(
    rb"(?:1[.-])?[2-9](?!11)\d\d([.-])[2-9]\d\d\1\d{4}%b" % NOT_LONGER,
)

NORTH_AMERICA_OPENED = re.compile(rb"[2-9](?!11)\d\d\)[ .-]?[2-9]\d\d[ .-]?\d{4}%b" % NOT_LONGER)
"""(212) 555-1234, from behind the bracket."""

NATIONAL = re.compile(
    rb"(?:"
    rb"0[1-9]([ .-])\d\d(?:\1\d\d){3}"  # France
    rb"|0(?:20([ -])\d{4}\2\d{4}|\d{3}([ -])\d{3}\3\d{3,4}|\d{4}([ -])(?:\d{6}|\d{3}\4\d{3}))"  # Britain, Australia
    rb"|0[1-9]\d{1,4}(?: ?/ ?\d{6,8}|-\d{6,8})"  # Germany
    rb"|0[1-9]-\d{4}-\d{4}|0[1-9]\d-\d{3,4}-\d{4}|0[1-9]\d\d-\d\d-\d{4}"  # Japan
    rb")%b" % NOT_LONGER
)

NATIONAL_OPENED = re.compile(rb"0\d{2,4}\)[ -]?\d{3,8}(?:[ -]\d{3,4})?%b" % NOT_LONGER)

DIGITS = b"0123456789"

MIN_NATIONAL_DIGITS, MAX_NATIONAL_DIGITS = 9, 12

PAIRS = re.compile(rb"\d\d(?:[ .-]\d\d)+")

HEX_PAIR_BEFORE = re.compile(rb"(?<![0-9A-Za-z])[0-9A-Fa-f]{2}[ .-]\Z")

HEX_PAIR_BEHIND = re.compile(rb"[ .-][0-9A-Fa-f]{2}(?![0-9A-Za-z])")

PATCH_LINE = re.compile(rb"[-@]|\+(?!\d)")

MAX_LINE = 400

SSN = re.compile(rb"(?!000|666|9)\d{3}([- ])(?!00)\d\d\1(?!0000)\d{4}%b" % NOT_LONGER)
"""Area, group and serial number (Social Security Administration, POMS RM 10201.035): no area of 000, 666 or from 900
on, no group of 00, no serial of 0000."""

NEVER_GIVEN = frozenset((b"078051120", b"219099999"))
"""Of a wallet's sample card, and of an advertisement."""

SSN_BEFORE = re.compile(rb"(?:SSN|SS ?#|[Ss]ocial [Ss]ecurity)[^\n]{0,24}\Z")

MAX_BEFORE_SSN = 48


def find_international(window: Window) -> Span | None:
    """The number that begins with this plus sign. The lines that a patch adds are left alone."""
    before = window.before(1)
    if before.isalnum() or before in (b")", b"]", b"_", b"+", b"~"):
        return None  # a sum, or a suffix of a version
    match = window.match(INTERNATIONAL)
    if match is None or (before in (b"", b"\n") and _in_diff(window, match.end())):
        return None
    num_digits = _count_digits(match[0])
    if num_digits == len(match[0]) - 1:
        return match.span() if MIN_UNBROKEN_DIGITS <= num_digits <= MAX_UNBROKEN_DIGITS else None
    return match.span() if MIN_DIGITS <= num_digits <= MAX_DIGITS else None


def find_national(window: Window) -> Span | None:
    """The number that begins with this digit, or with a bracket before it."""
    opened = window.before(1) == b"("
    if opened:
        match = window.match(NATIONAL_OPENED) or window.match(NORTH_AMERICA_OPENED)
        if match is not None and _national_length(match[0]):
            return window.place - 1, match.end()
    if window.before(1) in (b"-", b"/", b"#", b"$", b"="):
        return None
    match = window.match(NORTH_AMERICA)
    if match is not None:
        return match.span()
    match = window.match(NATIONAL)
    if match is None or not _national_length(match[0]) or _is_row_of_pairs(window, match):
        return None
    return match.span()


def find_ssn(window: Window) -> Span | None:
    """The number 123-45-6789 that begins here, if its parts may be given out; with blanks only where it is said."""
    match = window.match(SSN)
    if match is None or window.before(1) in (b"-", b"#", b"/"):
        return None
    if match[1] == b" " and SSN_BEFORE.search(window.before(MAX_BEFORE_SSN)) is None:
        return None
    return None if match[0].translate(None, b"- ") in NEVER_GIVEN else match.span()


def _count_digits(text: bytes) -> int:
    return len(text) - len(text.translate(None, DIGITS))


def _national_length(text: bytes) -> bool:
    return MIN_NATIONAL_DIGITS <= _count_digits(text) <= MAX_NATIONAL_DIGITS


def _is_row_of_pairs(window: Window, match: re.Match[bytes]) -> bool:
    """Whether it is a piece of a hex dump, or pairs that count up (01 02 03 04 05)."""
    if PAIRS.fullmatch(match[0]) is None:
        return False
    if HEX_PAIR_BEFORE.search(window.before(4)) or HEX_PAIR_BEHIND.match(window.memory, match.end(), window.end):
        return True
    pairs = [int(match[0][place : place + 2]) for place in range(0, len(match[0]), 3)]
    return len({second - first for first, second in itertools.pairwise(pairs)}) == 1


def _in_diff(window: Window, end: int) -> bool:
    """Whether the line before or behind is another line of a patch, and not the next number of a list."""
    lines_before = window.before(MAX_LINE).split(b"\n")[:-1]
    lines_behind = bytes(window.memory[end : min(end + MAX_LINE, window.end)]).split(b"\n")[1:]
    return any(PATCH_LINE.match(line) for line in (*lines_before[-1:], *lines_behind[:1]))
