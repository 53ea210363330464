"""Words as 64-bit hashes, straight from UTF-8 bytes: what both scoring models see of a text.

    "Don't panic,\nit's 42 μm"  ->  don ' t panic ,  END  it ' s 00 μm  END

A word is a run of letters and digits, with A-Z in lower case and every digit a 0 (as in CCNet, Wenzek et al. 2020), or
one other visible character. A line is a sentence, as for KenLM: each line with a word in it ends with a line end.

Letters are the ASCII ones and all of U+00C0 to U+1FFF, which the first byte of a character tells: Latin, Greek,
Cyrillic, Hebrew, Arabic, the scripts of India. From U+2000 on every character is a word of its own, which suits
Chinese, Japanese and Korean. Thai, Lao, Khmer and Burmese lie below and have no blanks: there a word is a whole phrase.
Capitals beyond ASCII stay capitals. This is no linguist's tokenizer, but it runs at some 300 MB/s, and the models
only need samples and corpus to be cut alike.

The kernels of the models work on these hashes and do not call this one: numba's cached code of a kernel would not
notice a change of a function that it took from another module.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megalite.kernel import kernel
from megalite.texts import Texts

LINE_END = np.uint64(1)
LINE_START = np.uint64(2)
UNKNOWN = np.uint64(3)
"""Not words. Hashes of words have the top bit set, so they never equal these."""

_TOP_BIT = np.uint64(1 << 63)

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
"""FNV-1a (Fowler, Noll, Vo 1991)."""

_LINE_FEED, _LAST_BLANK, _DELETE = 0x0A, 0x20, 0x7F
"""The ASCII control characters count as blanks."""

BATCH_BYTES = 8_000_000


def hash_batches(texts: Texts) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`hash_words` of some megabytes of texts at a time, to bound the memory and stay in the processor's cache."""
    begin = 0
    while begin < len(texts):
        end = int(np.searchsorted(texts.offsets, texts.offsets[begin] + BATCH_BYTES, side="right")) - 1
        end = max(end, begin + 1)
        yield hash_words(texts.buffer, texts.offsets[begin : end + 1])
        begin = end


def _folded_bytes() -> np.ndarray:
    """What a byte counts as inside a word, uint8 [256]; 0 ends the word."""
    folded = np.zeros(256, np.uint8)
    folded[0x80:0xC0] = np.arange(0x80, 0xC0)  # continuation bytes belong to the letter before them
    folded[0xC3:0xE2] = np.arange(0xC3, 0xE2)
    for byte in range(0x80):
        if chr(byte).isalnum():
            folded[byte] = ord("0") if chr(byte).isdigit() else ord(chr(byte).lower())
    return folded


_FOLDED = _folded_bytes()


@kernel
def hash_words(buffer: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words of texts: LINE_START, words, LINE_END, LINE_START, ...

    Args:
        buffer: uint8 [bytes].
        offsets: int64 [texts + 1].

    Returns:
        uint64 [words + 2 x lines], and int64 [texts + 1], where in it each text begins.
    """
    # a line of n bytes and a line feed gives n + 2 values at most; memory that is not written to costs nothing
    num_bytes = offsets[-1] - offsets[0]
    stream = np.empty(num_bytes + num_bytes // 2 + 2 * offsets.size, np.uint64)
    borders = np.zeros(offsets.size, np.int64)
    size = 0
    for text in range(offsets.size - 1):
        inside_line, inside_word, hash_ = False, False, _FNV_OFFSET
        position, end = offsets[text], offsets[text + 1]
        while position < end:
            byte = buffer[position]
            position += 1
            folded = _FOLDED[byte]
            if folded != 0:
                hash_ = (hash_ ^ np.uint64(folded)) * _FNV_PRIME
                inside_word = True
                continue
            if inside_word:
                size, inside_line = _put_word(stream, size, inside_line, hash_)
                inside_word, hash_ = False, _FNV_OFFSET
            if byte == _LINE_FEED and inside_line:
                stream[size] = LINE_END
                size += 1
                inside_line = False
            elif byte > _LAST_BLANK and byte != _DELETE:
                hash_ = (hash_ ^ np.uint64(byte)) * _FNV_PRIME
                while position < end and buffer[position] & 0xC0 == 0x80:  # the rest of the character
                    hash_ = (hash_ ^ np.uint64(buffer[position])) * _FNV_PRIME
                    position += 1
                size, inside_line = _put_word(stream, size, inside_line, hash_)
                hash_ = _FNV_OFFSET
        if inside_word:
            size, inside_line = _put_word(stream, size, inside_line, hash_)
        if inside_line:
            stream[size] = LINE_END
            size += 1
        borders[text + 1] = size
    return stream[:size], borders


@kernel
def _put_word(stream: np.ndarray, size: int, inside_line: bool, hash_: np.uint64) -> tuple[int, bool]:
    """Write a word, and the start of a line before its first; the bits are mixed as MurmurHash3 does (Appleby 2011)."""
    if not inside_line:
        stream[size] = LINE_START
        size += 1
    hash_ = (hash_ ^ (hash_ >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    hash_ = (hash_ ^ (hash_ >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    stream[size] = hash_ ^ (hash_ >> np.uint64(33)) | _TOP_BIT
    return size + 1, True
