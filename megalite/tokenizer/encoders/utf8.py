"""Characters in a buffer of valid UTF-8, for compiled code."""

from __future__ import annotations

import numpy as np

from megalite.kernel import bare_kernel

ASCII_END = 0x80

CHUNK = 64
"""Bytes that are looked at together."""


@bare_kernel
def char_size(first: int) -> int:
    """Bytes of the character that begins with this byte."""
    if first < 0x80:
        return 1
    if first < 0xE0:
        return 2
    return 3 if first < 0xF0 else 4


@bare_kernel
def code_point(buffer: np.ndarray, at: int) -> int:
    """The character that begins there."""
    first = np.int64(buffer[at])
    if first < 0x80:
        return first
    if first < 0xE0:
        return (first & 0x1F) << 6 | buffer[at + 1] & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | (buffer[at + 1] & 0x3F) << 6 | buffer[at + 2] & 0x3F
    tail = (buffer[at + 1] & 0x3F) << 12 | (buffer[at + 2] & 0x3F) << 6 | buffer[at + 3] & 0x3F
    return (first & 0x07) << 18 | tail


@bare_kernel
def skip_ascii(buffer: np.ndarray, at: int, stop: int) -> int:
    """Where the first chunk begins that is not all ASCII, or less than a chunk before stop. Chunks of this size are a
    few instructions each, on all their bytes at once."""
    while at + CHUNK <= stop:
        bits = np.uint8(0)
        for place in range(at, at + CHUNK):
            bits |= buffer[place]
        if bits >= ASCII_END:
            break
        at += CHUNK
    return at
