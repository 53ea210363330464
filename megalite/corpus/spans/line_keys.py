"""The lines of texts, and a key of each that forgets blanks around it, case, and if wanted digits.

Imports numba at import; import it where the work begins.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.spans.windows import BASE, mixed
from megalite.kernel import kernel

NEWLINE = 10


@kernel
def line_keys(
    buffer: np.ndarray, offsets: np.ndarray, min_chars: int, fold_digits: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every line that is long enough.

    A line ends at a line feed, which belongs to it, or with its text. Its key is a 64-bit hash of its bytes without
    the ASCII blanks at both ends, ASCII letters in lower case, and every digit as 0 with fold_digits. 64 bits suffice
    here: among a billion lines and a million frequent ones, the chance of even one false match is 1 in 20,000.

    Args:
        buffer, offsets: the texts.
        min_chars: shortest line, in bytes without the blanks around.
        fold_digits: any digit equals any other.

    Returns:
        Of each line: key (uint64), text (int64), first byte and byte behind the last (int64, in the text).
    """
    num_lines = 0
    for text in range(offsets.size - 1):
        if offsets[text + 1] > offsets[text]:
            num_lines += 1 + np.count_nonzero(buffer[offsets[text] : offsets[text + 1]] == NEWLINE)
    keys, texts = np.empty(num_lines, np.uint64), np.empty(num_lines, np.int64)
    starts, ends = np.empty(num_lines, np.int64), np.empty(num_lines, np.int64)
    num_lines = 0
    for text in range(offsets.size - 1):
        begin, end = offsets[text], offsets[text + 1]
        start = begin
        while start < end:
            behind = start
            while behind < end and buffer[behind] != NEWLINE:
                behind += 1
            left, right = _stripped(buffer, start, behind)
            behind = min(behind + 1, end)
            if right - left >= min_chars:
                keys[num_lines], texts[num_lines] = _key(buffer, left, right, fold_digits), text
                starts[num_lines], ends[num_lines] = start - begin, behind - begin
                num_lines += 1
            start = behind
    return keys[:num_lines], texts[:num_lines], starts[:num_lines], ends[:num_lines]


@kernel
def _is_blank(byte: int) -> bool:
    return byte == 32 or 9 <= byte <= 13


@kernel
def _stripped(buffer: np.ndarray, left: int, right: int) -> tuple[int, int]:
    while left < right and _is_blank(buffer[left]):
        left += 1
    while left < right and _is_blank(buffer[right - 1]):
        right -= 1
    return left, right


@kernel
def _key(buffer: np.ndarray, left: int, right: int, fold_digits: bool) -> np.uint64:
    key = np.uint64(right - left)
    for place in range(left, right):
        byte = buffer[place]
        if 65 <= byte <= 90:
            byte += 32
        elif fold_digits and 48 <= byte <= 57:
            byte = 48
        key = key * BASE + np.uint64(byte)
    return mixed(key)
