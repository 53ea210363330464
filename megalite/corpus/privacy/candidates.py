"""One pass over the bytes that finds every place where personal data or a secret could stand.

    "... mail bob@corp.com or call 212-555-1234 ..."
                 ^ AT                 ^ PHONE: digits in groups of 3, 3, 4

What decides is cheap and never misses: a sign (`@`, `:`, `+`, `=`), the sizes of groups of digits, the first letters
of a word. The exact and slow checks (`telephone`, `payment`, `network`, `credentials`, and where they are asked for
`people` and `addresses`) look at these places only; in ordinary text there are some tens of them in a megabyte, and of
those of names and houses some hundreds.

A text may be made of nothing else, so a check must not read far from each of its places: those that read to the end
of a run of letters and hyphens get one place in a run (keys), or only places near its end (tokens).

This module needs numba at import; import it where a station begins.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.privacy.digits import bit, codes_of_number, has_international_digits, is_digit
from megalite.corpus.privacy.window import (
    ADDRESS,
    ASSIGNED_NAMES,
    ASSIGNMENT,
    AT,
    COLONS,
    IBAN,
    JWT,
    KEY,
    NAME,
    PLUS,
    PREFIXES,
)
from megalite.corpus.privacy.words import codes_of_house_number, codes_of_name
from megalite.kernel import kernel

OTHER, SIGN, LETTER, INITIAL, DIGIT = range(5)
"""Kinds of bytes. INITIAL is a letter with which something could begin that the scan looks for."""

KIND_BITS = 3

MAX_DOMAIN = 255
"""Bytes of an e-mail address behind the @."""

HYPHEN = 45

MAX_INNER_HEADER = 256
"""Bytes of a JSON web token's header behind a hyphen, so behind something that may be part of another token."""


def _byte_kinds() -> np.ndarray:
    kinds = np.full(256, OTHER, np.uint8)
    kinds[0x80:] = LETTER
    kinds[[*b"abcdefghijklmnopqrstuvwxyz_"]] = LETTER
    kinds[[*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]] = INITIAL  # of an account, perhaps
    kinds[[prefix[0] for prefix, _ in PREFIXES]] = INITIAL
    kinds[[*b"0123456789"]] = DIGIT
    kinds[[*b"@:=+"]] = SIGN
    return kinds


def _stops() -> np.ndarray:
    """bool [kind before << KIND_BITS | kind]: whether to look closer: at signs, and where a word begins."""
    stops = np.zeros(1 << 2 * KIND_BITS, np.bool_)
    for before in (OTHER, SIGN, LETTER, INITIAL, DIGIT):
        stops[before << KIND_BITS | SIGN] = True
        stops[before << KIND_BITS | INITIAL] = stops[before << KIND_BITS | DIGIT] = before in (OTHER, SIGN)
    return stops


def _table_of(words: list[bytes]) -> np.ndarray:
    """uint8 [words, longest + 1]; a zero ends each."""
    table = np.zeros((len(words), max(map(len, words)) + 1), np.uint8)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = np.frombuffer(word, np.uint8)
    return table


def _pairs(words: list[bytes]) -> np.ndarray:
    """bool [65536]: the first two bytes of some word."""
    pairs = np.zeros(1 << 16, np.bool_)
    pairs[[word[0] << 8 | word[1] for word in words]] = True
    return pairs


BYTE_KINDS = _byte_kinds()
STOPS = _stops()
PREFIX_TABLE = _table_of([prefix for prefix, _ in PREFIXES])
PREFIX_CODES = np.array([code for _, code in PREFIXES], np.uint8)
PREFIX_PAIRS = _pairs([prefix for prefix, _ in PREFIXES])
NAME_TABLE = _table_of([name[::-1] for name in ASSIGNED_NAMES])
NAME_PAIRS = _pairs([name[::-1] for name in ASSIGNED_NAMES])


@kernel
def find_candidates(buffer: np.ndarray, offsets: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the places to look at.

    Args:
        buffer: uint8 [bytes].
        offsets: int64 [documents + 1].
        wanted: the codes of `places` to look for, bit by bit.

    Returns:
        Of each candidate, in order of place: its code (uint8), its place in the buffer and its document (int64).
    """
    found = (np.empty(64, np.uint8), np.empty(64, np.int64), np.empty(64, np.int64))
    count, token_end = 0, np.int64(0)
    for document in range(offsets.size - 1):
        start, end = offsets[document], offsets[document + 1]
        before = OTHER
        for place in range(start, end):
            kind = BYTE_KINDS[buffer[place]]
            stop = STOPS[before << KIND_BITS | kind]
            before = kind
            if not stop:
                continue
            if kind == SIGN:
                codes = _codes_of_sign(buffer, start, place, end)
            elif kind == DIGIT:
                codes = codes_of_number(buffer, start, place, end)
                if wanted & bit(ADDRESS):
                    codes |= codes_of_house_number(buffer, start, place, end)
            else:
                codes = _codes_of_word(buffer, start, place, end)
                if wanted & bit(NAME) and buffer[place] <= 90:  # Z
                    codes |= codes_of_name(buffer, start, place, end)
                if codes & bit(JWT):
                    token_end = _end_of_token(buffer, max(place, token_end), end)
                    if not _may_be_header(buffer, start, place, token_end, end):
                        codes ^= bit(JWT)
            codes &= wanted
            while codes:
                if count == found[0].size:
                    found = (_doubled(found[0]), _doubled(found[1]), _doubled(found[2]))
                code = _lowest_bit(codes)
                found[0][count], found[1][count], found[2][count] = code, place, document
                count += 1
                codes ^= bit(code)
    return found[0][:count], found[1][:count], found[2][:count]


@kernel
def _doubled(array: np.ndarray) -> np.ndarray:
    larger = np.empty(2 * array.size, array.dtype)
    larger[: array.size] = array
    return larger


@kernel
def _lowest_bit(codes: int) -> int:
    code = 0
    while not codes >> code & 1:
        code += 1
    return code


@kernel
def _is_letter(byte: int) -> bool:
    return 97 <= byte | 32 <= 122


@kernel
def _is_hex(byte: int) -> bool:
    return is_digit(byte) or 97 <= byte | 32 <= 102


@kernel
def _codes_of_sign(buffer: np.ndarray, start: int, place: int, end: int) -> int:
    """What a sign may be part of."""
    sign = buffer[place]
    codes = np.int64(0)
    if place + 1 >= end:
        return codes
    if sign == 64:  # @
        if place > start and _may_be_domain(buffer, place + 1, end):
            codes |= bit(AT)
    elif sign == 43:  # +
        if 49 <= buffer[place + 1] <= 57 and has_international_digits(buffer, place + 1, end):
            codes |= bit(PLUS)
    else:
        then = buffer[place + 1]
        if sign == 58 and (then == 58 or _is_hex(then)) and _may_be_ipv6(buffer, start, place, end):
            codes |= bit(COLONS)
        if _ends_in_name(buffer, start, place):
            codes |= bit(ASSIGNMENT)
    return codes


@kernel
def _codes_of_word(buffer: np.ndarray, start: int, place: int, end: int) -> int:
    """What a word may be by its first letters. Behind a hyphen no key begins: it would be a piece of a longer name."""
    codes = np.int64(0)
    if place + 4 >= end:
        return codes
    if PREFIX_PAIRS[np.int64(buffer[place]) << 8 | buffer[place + 1]]:
        is_inner = place > start and buffer[place - 1] == HYPHEN
        for number in range(PREFIX_CODES.size):
            code = PREFIX_CODES[number]
            if not (is_inner and code == KEY) and _matches(buffer, place, end, PREFIX_TABLE[number]):
                codes |= bit(code)
    letters = 65 <= buffer[place] <= 90 and 65 <= buffer[place + 1] <= 90
    if letters and is_digit(buffer[place + 2]) and is_digit(buffer[place + 3]):
        codes |= bit(IBAN)
    return codes


@kernel
def _end_of_token(buffer: np.ndarray, place: int, end: int) -> int:
    """Where the run of letters, digits, underscores and hyphens ends that goes on at a place."""
    while place < end and (
        _is_letter(buffer[place]) or is_digit(buffer[place]) or buffer[place] == 95 or buffer[place] == HYPHEN
    ):
        place += 1
    return place


@kernel
def _may_be_header(buffer: np.ndarray, start: int, place: int, token_end: int, end: int) -> bool:
    """Whether a token's second part, which begins with eyJ too, follows the run that goes on at a place."""
    if token_end + 3 >= end or buffer[token_end] != 46:
        return False
    if buffer[token_end + 1] != 101 or buffer[token_end + 2] != 121 or buffer[token_end + 3] != 74:
        return False
    return place == start or buffer[place - 1] != HYPHEN or token_end - place <= MAX_INNER_HEADER


@kernel
def _may_be_domain(buffer: np.ndarray, place: int, end: int) -> bool:
    """Whether letters, digits, hyphens and dots follow, with a letter behind some dot."""
    if not (is_digit(buffer[place]) or _is_letter(buffer[place])):
        return False
    for at in range(place + 1, min(end - 1, place + MAX_DOMAIN)):
        byte = buffer[at]
        if byte == 46 and _is_letter(buffer[at + 1]):
            return True
        if not (is_digit(byte) or _is_letter(byte) or byte == 45 or byte == 46):
            return False
    return False


@kernel
def _may_be_ipv6(buffer: np.ndarray, start: int, place: int, end: int) -> bool:
    """Whether the colon is the first of a run of hexadecimal groups that has `::` or at least six colons."""
    first = place
    while first > start and place - first <= 4 and _is_hex(buffer[first - 1]):
        first -= 1
    if first > start:
        before = buffer[first - 1]
        if before == 58 or before == 46 or BYTE_KINDS[before] >= LETTER:
            return False
    num_colons, shortened = 0, False
    while place < end and (_is_hex(buffer[place]) or buffer[place] == 58):
        if buffer[place] == 58:
            num_colons += 1
            shortened |= buffer[place - 1] == 58 and place > first
        place += 1
    return num_colons >= 6 or (shortened and num_colons >= 2)


@kernel
def _matches(buffer: np.ndarray, place: int, end: int, word: np.ndarray) -> bool:
    """Whether the bytes at a place are a word, which ends in a zero."""
    for number in range(word.size):
        if word[number] == 0:
            return True
        if place + number >= end or buffer[place + number] != word[number]:
            return False
    return True


@kernel
def _ends_in_name(buffer: np.ndarray, start: int, place: int) -> bool:
    """Whether the name before a sign, perhaps in quotes or with blanks behind it, ends like a secret's."""
    last = place - 1
    while last >= start and place - last <= 4 and buffer[last] in (32, 34, 39):  # blank " '
        last -= 1
    if last - 2 < start or not NAME_PAIRS[(np.int64(buffer[last]) | 32) << 8 | buffer[last - 1] | 32]:
        return False
    for number in range(NAME_TABLE.shape[0]):
        for offset in range(NAME_TABLE.shape[1]):
            letter = NAME_TABLE[number, offset]
            if letter == 0:
                return True
            byte = buffer[last - offset] if last - offset >= start else np.uint8(0)
            if byte != letter and (not _is_letter(byte) or byte | 32 != letter):
                break
    return False
