"""Blanks in UTF-8: every run of them as one space, so that two texts can be compared without regard to layout."""

from __future__ import annotations

import numpy as np

from megalite.data.kernel import kernel
from megalite.data.texts import Texts


def squeeze(texts: Texts) -> Texts:
    """Each text as `" ".join(text.split())` would have it."""
    return Texts(*_squeeze(texts.buffer, texts.offsets))


@kernel
def _squeeze(buffer: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = np.empty(offsets[-1] - offsets[0], np.uint8)
    borders = np.zeros(offsets.size, np.int64)
    filled = 0
    for text in range(offsets.size - 1):
        begin = filled
        place, end = offsets[text], offsets[text + 1]
        gap = False
        while place < end:
            byte = buffer[place]
            if byte < 0x80:
                size = 1 if byte == 32 or 9 <= byte <= 13 or 0x1C <= byte <= 0x1F else 0
            elif byte == 0xC2 or 0xE1 <= byte <= 0xE3:
                size = _wide_blank_size(buffer, place)
            else:
                size = 0
            if size:
                gap = True
                place += size
                continue
            if gap and filled > begin:
                out[filled] = 32
                filled += 1
            gap = False
            out[filled] = byte
            filled += 1
            place += 1
        borders[text + 1] = filled
    return out[:filled], borders


@kernel
def _wide_blank_size(buffer: np.ndarray, place: int) -> int:
    """Bytes of the blank (as str.isspace has it) of several bytes that begins at a place, or 0.

    Called for the few bytes that may begin one: numba counts references at every call, which takes longer than the rest
    of the loop.
    """
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
