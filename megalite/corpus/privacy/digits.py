"""What a number may be by the sizes of its groups of digits and by the signs between them; compiled, for the scan.

4111 1111 1111 1111     4, 4, 4, 4 digits: perhaps a card
212-555-1234            3, 3, 4 with hyphens: perhaps a telephone
93.184.215.14           four groups of up to 3 with dots: perhaps an address
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.privacy.window import CARD, DOTTED, PHONE, SSN
from megalite.kernel import kernel

SIZE_BITS = 5

MAX_SIZE = (1 << SIZE_BITS) - 1


def _pack(*sizes: int) -> int:
    return sum(size << SIZE_BITS * number for number, size in enumerate(sizes))


MASK_1, MASK_3, MASK_4 = (_pack(*[MAX_SIZE] * num_groups) for num_groups in (1, 3, 4))

SIZES_3_2_4 = _pack(3, 2, 4)
SIZES_3_3_4 = _pack(3, 3, 4)
SIZES_1_3_3_4 = _pack(1, 3, 3, 4)
SIZES_4_4_4_4 = _pack(4, 4, 4, 4)
SIZES_4_6_5 = _pack(4, 6, 5)
SIZES_4_6_4 = _pack(4, 6, 4)

MAX_GROUPS = 6
"""Groups of digits looked at from the first one of a number."""

MAX_INTERNATIONAL = 24
"""Bytes behind a plus sign within which there must be MIN_INTERNATIONAL digits."""

MIN_INTERNATIONAL = 8


@kernel
def bit(code: int) -> int:
    """The flag of a code of `places`."""
    return np.int64(1) << np.int64(code)


@kernel
def is_digit(byte: int) -> bool:
    """Whether a byte is one of 0 to 9."""
    return 48 <= byte <= 57


@kernel
def codes_of_number(buffer: np.ndarray, start: int, place: int, end: int) -> int:
    """What a number may be by the sizes of its groups of digits and by what stands between them."""
    codes = np.int64(0)
    if place - 2 >= start and is_digit(buffer[place - 2]) and buffer[place - 1] in (44, 45, 46, 47, 58):  # , - . / :
        return codes  # in the middle of a number
    first = buffer[place]
    sizes, signs, num_groups, num_digits = _read_groups(buffer, place, end)
    if num_groups >= 4 and signs & 0xFFFFFF == 0x2E2E2E and _at_most(sizes, 4, 3):
        codes |= bit(DOTTED)
    if sizes & MASK_3 == SIZES_3_2_4 and signs & 0xFFFF in (0x2D2D, 0x2020):
        codes |= bit(SSN)
    unbroken = sizes & MASK_1
    if (
        13 <= unbroken <= 19
        or sizes & MASK_4 == SIZES_4_4_4_4
        or sizes & MASK_3 == SIZES_4_6_5
        or sizes & MASK_3 == SIZES_4_6_4
    ):
        codes |= bit(CARD)
    first_sign = signs & 0xFF
    if (
        (first == 48 and num_groups >= 2 and num_digits >= 9)  # a national number with its leading 0
        or (sizes & MASK_3 == SIZES_3_3_4 and first_sign in (0x29, 0x2D, 0x2E))  # ) - .
        or (first == 49 and sizes & MASK_4 == SIZES_1_3_3_4 and first_sign in (0x2D, 0x2E))
    ):
        codes |= bit(PHONE)
    return codes


@kernel
def _read_groups(buffer: np.ndarray, place: int, end: int) -> tuple[int, int, int, int]:
    """Read up to MAX_GROUPS groups of digits.

    Returns:
        Their sizes, SIZE_BITS each; the signs behind them, 8 bits each; how many groups; how many digits.
    """
    sizes, signs, num_groups, num_digits = np.int64(0), np.int64(0), 0, 0
    while True:
        group = place
        while place < end and is_digit(buffer[place]):
            place += 1
        sizes |= min(place - group, MAX_SIZE) << (SIZE_BITS * num_groups)
        num_digits += place - group
        num_groups += 1
        sign, skip = _sign_between(buffer, place, end)
        if skip == 0 or num_groups == MAX_GROUPS:
            return sizes, signs, num_groups, num_digits
        signs |= np.int64(sign) << (8 * (num_groups - 1))
        place += skip


@kernel
def _sign_between(buffer: np.ndarray, place: int, end: int) -> tuple[int, int]:
    """The sign at a place if a digit follows it, and the bytes up to that digit; else zeros."""
    if place + 1 >= end:
        return np.uint8(0), 0
    sign, then = buffer[place], buffer[place + 1]
    if sign not in (32, 41, 45, 46, 47):  # blank ) - . /
        return np.uint8(0), 0
    if is_digit(then):
        return sign, 1
    if sign == 41 and then in (32, 45, 46) and place + 2 < end and is_digit(buffer[place + 2]):
        return sign, 2
    if sign == 32 and then == 47 and place + 3 < end and buffer[place + 2] == 32 and is_digit(buffer[place + 3]):
        return then, 3
    return np.uint8(0), 0


@kernel
def _at_most(sizes: int, num_groups: int, largest: int) -> bool:
    """Whether the first groups have at most so many digits."""
    for _ in range(num_groups):
        if sizes & MAX_SIZE > largest:
            return False
        sizes >>= SIZE_BITS
    return True


@kernel
def has_international_digits(buffer: np.ndarray, place: int, end: int) -> bool:
    """Whether enough digits follow, with nothing but blanks and ( ) - . / between them."""
    num_digits = 0
    for at in range(place, min(end, place + MAX_INTERNATIONAL)):
        byte = buffer[at]
        if is_digit(byte):
            num_digits += 1
        elif byte not in (32, 40, 41, 45, 46, 47):
            break
    return num_digits >= MIN_INTERNATIONAL
