"""Whether a word is a given name or follows a title, and whether a number is a house's; compiled, for the scan.

Mr. Alan Turing            given name, title       perhaps a person
10 Downing Street          a number before a capital
Hauptstraße 5, 10115 B.    a number behind a kind of street, or before a postcode of five digits
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.privacy.digits import bit, is_digit
from megalite.corpus.privacy.window import ADDRESS, NAME
from megalite.corpus.privacy.word_lists import BOXES, GERMAN_STREETS, GIVEN_NAMES, INTRODUCTIONS, TITLES
from megalite.kernel import kernel

SEED = np.uint64(0xCBF29CE484222325)
FACTOR = np.uint64(0x100000001B3)
"""FNV-1a, 64 bits."""

MAX_WORD = 24
"""Bytes of a given name."""

MAX_HOUSE_DIGITS = 5

POSTCODE_DIGITS = 5


def hash_of(word: bytes) -> int:
    """The hash by which a word is looked up."""
    value = int(SEED)
    for byte in word:
        value = (value ^ byte) * int(FACTOR) & 0xFFFFFFFFFFFFFFFF
    return value


def _reversed_table(words: tuple[bytes, ...]) -> np.ndarray:
    """uint8 [words, longest + 1], each from its end on; a zero ends each."""
    table = np.zeros((len(words), max(map(len, words)) + 1), np.uint8)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = np.frombuffer(word[::-1], np.uint8)
    return table


def _last_bytes(words: tuple[bytes, ...]) -> np.ndarray:
    """bool [256]: with what some word ends."""
    ends = np.zeros(256, np.bool_)
    ends[[word[-1] for word in words]] = True
    return ends


GIVEN_HASHES = np.sort(np.array([hash_of(name) for name in GIVEN_NAMES], np.uint64))

BEFORE_NAMES = (*TITLES, *(title + b"." for title in TITLES), *INTRODUCTIONS)
BEFORE_NAME_TABLE, BEFORE_NAME_ENDS = _reversed_table(BEFORE_NAMES), _last_bytes(BEFORE_NAMES)

BEFORE_NUMBERS = (*(street.encode() for street in GERMAN_STREETS), *BOXES)
BEFORE_NUMBER_TABLE, BEFORE_NUMBER_ENDS = _reversed_table(BEFORE_NUMBERS), _last_bytes(BEFORE_NUMBERS)


@kernel
def codes_of_name(buffer: np.ndarray, start: int, place: int, end: int) -> int:
    """What a word that begins with a capital may be: a name, if it is a given one or something says so before it."""
    if _is_given_name(buffer, place, end) or _ends_in(buffer, start, place, BEFORE_NAME_TABLE, BEFORE_NAME_ENDS):
        return bit(NAME)
    return np.int64(0)


@kernel
def codes_of_house_number(buffer: np.ndarray, start: int, place: int, end: int) -> int:
    """Whether a number may be that of a house or of a post office box."""
    at = place
    while at < end and at - place <= MAX_HOUSE_DIGITS and is_digit(buffer[at]):
        at += 1
    if at - place > MAX_HOUSE_DIGITS:
        return np.int64(0)
    if _ends_in(buffer, start, place, BEFORE_NUMBER_TABLE, BEFORE_NUMBER_ENDS):
        return bit(ADDRESS)
    if at < end and 97 <= buffer[at] | 32 <= 122:  # 221B
        at += 1
    elif at + 2 < end and buffer[at] == 32 and 97 <= buffer[at + 1] <= 122 and buffer[at + 2] in (10, 32, 44):  # 12 b
        at += 2
    if at < end and buffer[at] == 45:  # 12-14
        at += 1
        while at < end and at - place <= 2 * MAX_HOUSE_DIGITS and is_digit(buffer[at]):
            at += 1
    if at + 1 < end and buffer[at] == 32:
        then = buffer[at + 1]
        if 65 <= then <= 90 or (is_digit(then) and _is_ordinal(buffer, at + 1, end)):
            return bit(ADDRESS)
    if at < end and buffer[at] == 44:  # ,
        at += 1
    at += 1
    if at + 1 < end and buffer[at - 1] in (10, 32) and buffer[at] == 68 and buffer[at + 1] == 45:  # D-
        at += 2
        return bit(ADDRESS) if _is_postcode(buffer, at, end) else np.int64(0)
    if at < end and buffer[at - 1] in (10, 32) and _is_postcode(buffer, at, end):
        return bit(ADDRESS)
    return np.int64(0)


@kernel
def _is_given_name(buffer: np.ndarray, place: int, end: int) -> bool:
    hashed, at = SEED, place
    while at < end and at - place < MAX_WORD and (97 <= buffer[at] | 32 <= 122 or buffer[at] >= 128):
        hashed = (hashed ^ np.uint64(buffer[at])) * FACTOR
        at += 1
    low, high = 0, GIVEN_HASHES.size
    while low < high:
        middle = (low + high) // 2
        if GIVEN_HASHES[middle] < hashed:
            low = middle + 1
        else:
            high = middle
    return low < GIVEN_HASHES.size and GIVEN_HASHES[low] == hashed


@kernel
def _ends_in(buffer: np.ndarray, start: int, place: int, table: np.ndarray, ends: np.ndarray) -> bool:
    """Whether one of some words, in any case of letters, stands before a place, with one to three blanks between."""
    last = place - 1
    while last >= start and place - last <= 3 and buffer[last] in (10, 32):
        last -= 1
    if last < start or last == place - 1 or not ends[_small(buffer[last])]:
        return False
    for number in range(table.shape[0]):
        for offset in range(table.shape[1]):
            letter = table[number, offset]
            if letter == 0:
                return True
            if last - offset < start or _small(buffer[last - offset]) != letter:
                break
    return False


@kernel
def _small(byte: int) -> int:
    return byte + 32 if 65 <= byte <= 90 else byte


@kernel
def _is_ordinal(buffer: np.ndarray, at: int, end: int) -> bool:
    """Whether up to three digits are followed by a letter: 5th, 42nd."""
    for place in range(at, min(at + 4, end)):
        if not is_digit(buffer[place]):
            return place > at and 97 <= buffer[place] <= 122
    return False


@kernel
def _is_postcode(buffer: np.ndarray, at: int, end: int) -> bool:
    """Whether five digits and a blank stand here."""
    if at + POSTCODE_DIGITS >= end or buffer[at + POSTCODE_DIGITS] != 32:
        return False
    digits = 0
    for place in range(at, at + POSTCODE_DIGITS):
        digits += is_digit(buffer[place])
    return digits == POSTCODE_DIGITS
