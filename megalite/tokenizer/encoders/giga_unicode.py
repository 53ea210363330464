"""Characters that gigatoken knows otherwise than the reference does: each has its own version of Unicode.

A character that is a letter since Unicode 17 and none before ends a word in one of them and not in the other. Which
these are is asked of gigatoken by a vocabulary that joins three pairs of bytes, each inside one word alone:

    x's   the word 's behind a letter, a number or a blank; x' and s behind all else
    xa    one word behind a letter
    x1    one word behind a number

Characters that the reference does not know are among them, whatever gigatoken takes them for: patterns of others ask
for more kinds than GPT-2's does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from megalite.kernel import kernel
from megalite.texts import Texts
from megalite.tokenizer.encoders.byte_level import (
    FIRST_SURROGATE,
    LETTER,
    NUM_CODE_POINTS,
    NUM_SURROGATES,
    NUMBER,
    OTHER,
    character_classes,
    members_of,
)
from megalite.tokenizer.encoders.byte_level_json import byte_letters
from megalite.tokenizer.encoders.utf8 import ASCII_END, CHUNK, char_size, code_point, skip_ascii

JOINED: dict[bytes, tuple[int, ...]] = {b"'s": (OTHER,), b"a": (LETTER,), b"1": (NUMBER,)}
"""What is put behind a character, and the classes behind which it makes another number of tokens than behind others."""

BLOCK = 256
"""Characters that are asked for together; one by one where their number of tokens is not as expected."""

Count = Callable[[list[bytes]], np.ndarray]
"""The number of tokens of each text."""


def probe_json() -> str:
    """The `tokenizer.json` that shows what a character is."""
    letters = byte_letters()
    tails = [letters[byte] for byte in range(0x80, 0xC0)]
    merges = [["'", "s"], *([tail, letter] for tail in tails for letter in "a1")]
    tokens = [*letters, *(left + right for left, right in merges)]
    splitter = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges}
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": splitter, "model": model}
    )


@lru_cache
def unknown_characters() -> np.ndarray:
    """Those that the reference's version of Unicode does not have: bool [NUM_CODE_POINTS]."""
    return members_of(r"\p{Cn}+", "\u0378")


def doubtful_characters(count: Count) -> np.ndarray:
    """Characters whose class is another one in gigatoken, and unknown ones: bool [NUM_CODE_POINTS].

    Args:
        count: tokens by gigatoken, with the vocabulary of `probe_json`.
    """
    surrogates = range(FIRST_SURROGATE, FIRST_SURROGATE + NUM_SURROGATES)
    points = np.delete(np.arange(NUM_CODE_POINTS), surrogates)[ASCII_END:]
    chars, classes = [chr(point).encode() for point in points], character_classes(split_digits=False)[points]
    sizes, found = np.array([len(char) for char in chars]), unknown_characters().copy()
    starts = np.arange(0, points.size, BLOCK)
    for end, special in JOINED.items():
        is_joined = np.isin(classes, special) != (end == b"'s")
        expected = sizes + len(end) - is_joined
        texts = [b"".join(char + end + b"\n" for char in chars[start : start + BLOCK]) for start in starts]
        wrong = count(texts) != np.add.reduceat(expected + 1, starts)
        places = np.flatnonzero(np.repeat(wrong, BLOCK)[: points.size])
        differs = count([chars[place] + end for place in places]) != expected[places]
        found[points[places[differs]]] = True
    return found


@kernel
def texts_with(buffer: np.ndarray, offsets: np.ndarray, chars: np.ndarray, found: np.ndarray) -> int:
    """Which texts have a character of some.

    Args:
        buffer: uint8 [bytes] of UTF-8.
        offsets: int64 [texts + 1] in it.
        chars: bool [NUM_CODE_POINTS], none of ASCII.
        found: bool [texts], takes the answers.

    Returns:
        How many.
    """
    total = 0
    for text in range(found.size):
        at, stop, has = offsets[text], offsets[text + 1], False
        while at < stop and not has:
            at = skip_ascii(buffer, at, stop)
            end = min(stop, at + CHUNK)
            while at < end and not has:
                if buffer[at] >= ASCII_END:
                    char = code_point(buffer, at)
                    has = char < NUM_CODE_POINTS and chars[char]
                at += char_size(buffer[at])
        found[text] = has
        total += has
    return total


def doubtful_texts(texts: Texts, chars: np.ndarray) -> np.ndarray | None:
    """Which texts have a character of some: bool [texts]; None for none of them."""
    found = np.empty(len(texts), np.bool_)
    return found if texts_with(texts.buffer, texts.offsets, chars, found) else None
