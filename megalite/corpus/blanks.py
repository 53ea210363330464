"""Blanks in UTF-8: every run of them as one space, so that two texts can be compared without regard to layout."""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel, read_only
from megalite.texts import Texts

NO_BLANK, IS_BLANK, MAY_BEGIN_ONE = range(3)
"""What a byte says by itself."""


def squeeze(texts: Texts) -> Texts:
    """Each text as `" ".join(text.split())` would have it."""
    out = np.empty(texts.num_bytes + 1, np.uint8)
    borders = np.zeros(len(texts) + 1, np.int64)
    _squeeze(read_only(texts.buffer), read_only(texts.offsets), KINDS, out, borders)
    return Texts(out[: borders[-1]], borders)


def _kinds() -> np.ndarray:
    """Of each byte, uint8 [256]: blanks of ASCII, and the first bytes of wider ones."""
    kinds = np.full(256, NO_BLANK, np.uint8)
    kinds[[0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x1F, 0x20]] = IS_BLANK
    kinds[[0xC2, 0xE1, 0xE2, 0xE3]] = MAY_BEGIN_ONE
    return kinds


KINDS = read_only(_kinds())


@bare_kernel
def _squeeze(buffer: np.ndarray, offsets: np.ndarray, kinds: np.ndarray, out: np.ndarray, borders: np.ndarray) -> None:
    """Write the texts into `out` [bytes + 1] and their borders into `borders` [texts + 1].

    Of every byte one is written, and the next one over it where it was a blank behind a blank: no branch depends on
    where words end, which a processor guesses badly.
    """
    one = np.uint64(1)  # all places are unsigned, or numba looks for negative ones
    filled = np.uint64(0)
    for text in range(offsets.size - 1):
        begin = filled
        place, end = np.uint64(offsets[text]), np.uint64(offsets[text + 1])
        after_blank = one  # blanks at the beginning go
        while place < end:
            byte = buffer[place]
            is_blank, size = np.uint64(kinds[byte]), one
            if is_blank == MAY_BEGIN_ONE:
                wide = _wide_blank_size(buffer, np.int64(place))
                is_blank, size = np.uint64(wide > 0), np.uint64(max(wide, 1))
            out[filled] = np.uint8(32) if is_blank else byte
            filled += one - (is_blank & after_blank)
            after_blank = is_blank
            place += size
        if after_blank and filled > begin:
            filled -= one
        borders[text + 1] = np.int64(filled)


@bare_kernel
def _wide_blank_size(buffer: np.ndarray, place: int) -> int:
    """Bytes of the blank (as str.isspace has it) of several bytes that begins at a place, or 0."""
    byte, second = buffer[place], buffer[place + 1]
    if byte == 0xC2:
        return 2 if second == 0x85 or second == 0xA0 else 0
    third = buffer[place + 2]
    if byte == 0xE1:
        return 3 if second == 0x9A and third == 0x80 else 0  # U+1680
    if byte == 0xE3:
        return 3 if second == 0x80 and third == 0x80 else 0  # U+3000
    if second == 0x81:
        return 3 if third == 0x9F else 0  # U+205F
    if second != 0x80:
        return 0
    return 3 if third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF else 0  # U+2000-200A, 2028, 2029, 202F
