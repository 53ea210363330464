"""Where GPT-2's pattern (Radford et al. 2019) splits a text into words, for compiled code.

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

    It's   two  lines\\n   ->   It|'s| | two| | lines|\\n

Which characters are letters, numbers and blanks is asked of the reference library's own pattern engine, all of Unicode
in one text, because it may know another version of Unicode than Python does. With split digits each numeric character
stands alone, and what is before it ends there, as at the end of a text.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megalite.kernel import bare_kernel, kernel
from megalite.tokenizer.encoders.utf8 import ASCII_END, CHUNK, char_size, code_point
from megalite.tokenizer.encoders.vocabulary import CUT, HARD, JOIN

OTHER, LETTER, NUMBER, SPACE, ALONE = range(5)
"""Classes of characters; ALONE is a word of its own."""

APOSTROPHE, BLANK = b"' "
D, E, L, M, R, S, T, V = b"delmrstv"
ZERO, NINE = b"09"
"""Bytes; compiled code does not fold `ord` of a constant."""

NUM_CODE_POINTS = 0x40000
"""Unicode beyond has no letters, numbers or blanks: private use, tags, and planes that are empty."""

FIRST_SURROGATE, NUM_SURROGATES = 0xD800, 0x800


@lru_cache
def character_classes(*, split_digits: bool) -> np.ndarray:
    """The class of each code point, uint8 [NUM_CODE_POINTS]; made once a process, in a second. Not to be changed."""
    classes = np.full(NUM_CODE_POINTS, OTHER, np.uint8)
    for name, (pattern, member) in {LETTER: (r"\p{L}+", "a"), NUMBER: (r"\p{N}+", "0"), SPACE: (r"\s+", " ")}.items():
        classes[members_of(pattern, member)] = name
    if split_digits:
        classes[members_of(None, "0")] = ALONE
    return classes


def members_of(pattern: str | None, member: str) -> np.ndarray:
    """Which characters match, by the reference library: bool [NUM_CODE_POINTS].

    Args:
        pattern: of runs of them; None for what its split of digits takes.
        member: one of them.
    """
    from tokenizers import Regex, pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=False)
    splitter = digits if pattern is None else pre_tokenizers.Split(Regex(pattern), "isolated")
    surrogates = range(FIRST_SURROGATE, FIRST_SURROGATE + NUM_SURROGATES)
    points = np.delete(np.arange(NUM_CODE_POINTS), surrogates)
    borders = np.zeros(points.size + 1, np.int8)
    for _, (start, _stop) in splitter.pre_tokenize_str("".join(map(chr, points))):
        borders[start] = 1
    # Runs of members and of others take turns, so a run is of members when its distance to a known one is even.
    run = np.cumsum(borders[:-1])
    found = np.zeros(NUM_CODE_POINTS, np.bool_)
    found[points[(run - run[points.searchsorted(ord(member))]) % 2 == 0]] = True
    return found


def pair_rules(classes: np.ndarray) -> np.ndarray:
    """What two bytes of ASCII, one behind the other in a word, say about its end: uint8 [65536].

    Two letters JOIN, a letter and a bracket CUT. A blank in front JOINs the letters behind it. What depends on more
    than two bytes is HARD: several blanks, an apostrophe with the beginning of an ending, all that is not ASCII.
    """
    rules = np.full((256, 256), HARD, np.uint8)
    kinds = classes[:ASCII_END]
    rules[:ASCII_END, :ASCII_END] = np.where((kinds[:, None] == kinds) & (kinds != ALONE), JOIN, CUT)
    rules[:ASCII_END, :ASCII_END][kinds == SPACE] = np.where(kinds == SPACE, HARD, CUT)
    rules[BLANK, :ASCII_END][(kinds != SPACE) & (kinds != ALONE)] = JOIN
    rules[APOSTROPHE, [S, T, R, V, M, L, D]] = HARD
    return rules.reshape(-1)


@bare_kernel
def next_hard_word(buffer: np.ndarray, start: int, stop: int, classes: np.ndarray) -> int:
    """Where the word that begins at start ends, by the pattern itself; stop is the end of the text."""
    first = buffer[start]
    if first == APOSTROPHE:
        size = _clitic(buffer, start + 1, stop)
        if size:
            return start + 1 + size
    at = start
    kind = _class_at(buffer, start, classes)
    if first == BLANK and start + 1 < stop:
        following = _class_at(buffer, start + 1, classes)
        if following != SPACE and following != ALONE:
            at, kind = start + 1, following
    last = at
    at += char_size(buffer[at])
    if kind == ALONE or at == stop:
        return at
    following = _class_at(buffer, at, classes)
    while following == kind:
        last = at
        at += char_size(buffer[at])
        if at == stop:
            return at
        following = _class_at(buffer, at, classes)
    if kind == SPACE and following != ALONE and last > start:
        return last  # the last blank goes to the word behind it
    return at


@bare_kernel
def _class_at(buffer: np.ndarray, at: int, classes: np.ndarray) -> int:
    if buffer[at] < ASCII_END:
        return np.int64(classes[buffer[at]])
    char = code_point(buffer, at)
    return np.int64(classes[char]) if char < NUM_CODE_POINTS else OTHER


@bare_kernel
def _clitic(buffer: np.ndarray, start: int, stop: int) -> int:
    """Bytes of the English ending behind an apostrophe, or 0."""
    if start < stop:
        first = buffer[start]
        if first in (S, T, M, D):
            return 1
        if start + 1 < stop:
            second = buffer[start + 1]
            if (second == E and (first in (R, V))) or (second == L and first == L):
                return 2
    return 0


@kernel
def cut_at_numbers(
    buffer: np.ndarray, offsets: np.ndarray, classes: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> int:
    """Cut texts where the pattern, on its own, would read on past the split of digits before it.

        a  12 ½¼   ->   a__ | 12_ | ½ | ¼        (_ is a blank)

    Of two blanks and more before a number it leaves the last one to the number, and numbers beyond ASCII, of several
    bytes, it takes as one word. Digits of ASCII in a row are one word to it too, which changes nothing where the
    vocabulary joins no digit to anything. A cut before a digit never does harm: a word ends there in any case.

    Args:
        buffer: uint8 [bytes] of UTF-8.
        offsets: int64 [texts + 1] in it.
        classes: of characters, with split digits.
        starts: int64, takes where pieces begin, as many as it has room for.
        counts: int64 [texts], takes the number of pieces of each; an empty text is one.

    Returns:
        The number of all pieces.
    """
    found = 0
    for text in range(counts.size):
        begin, stop, before = offsets[text], offsets[text + 1], found
        found = _add_start(starts, found, begin)
        at = last = begin
        while at < stop:
            end = min(stop, at + CHUNK)
            while at < end:
                first = buffer[at]
                size = char_size(first)
                if first < ASCII_END:
                    if ZERO <= first <= NINE and at > begin + 1 and _may_be_blanks(buffer, at, classes) and at > last:
                        last, found = at, _add_start(starts, found, at)
                elif _class_at(buffer, at, classes) == ALONE:
                    if at > last:
                        found = _add_start(starts, found, at)
                    if at + size < stop:
                        last, found = at + size, _add_start(starts, found, at + size)
                at += size
            at = _skip_uncut(buffer, at, stop)
        counts[text] = found - before
    return found


@bare_kernel
def _add_start(starts: np.ndarray, found: int, at: int) -> int:
    if found < starts.size:
        starts[found] = at
    return found + 1


@bare_kernel
def _skip_uncut(buffer: np.ndarray, at: int, stop: int) -> int:
    """Where the first chunk begins that may have to be cut, or less than a chunk before stop; two bytes precede it."""
    while at + CHUNK <= stop:
        bits = np.uint8(0)
        for place in range(at, at + CHUNK):
            byte = buffer[place]
            is_digit = (byte >= np.uint8(ZERO)) & (byte <= np.uint8(NINE))
            is_behind = _may_be_blank(buffer[place - 1]) & _may_be_blank(buffer[place - 2])
            bits |= np.uint8(is_digit & is_behind) | (byte & np.uint8(ASCII_END))
        if bits:
            break
        at += CHUNK
    return at


@bare_kernel
def _may_be_blank(byte: int) -> bool:
    """At a glance: all blanks of ASCII are below what prints."""
    return (byte <= np.uint8(BLANK)) | (byte >= np.uint8(ASCII_END))


@bare_kernel
def _may_be_blanks(buffer: np.ndarray, at: int, classes: np.ndarray) -> bool:
    """Whether the two characters before a place are blanks, or it takes a look beyond ASCII to tell."""
    one, two = buffer[at - 1], buffer[at - 2]
    return (one >= ASCII_END or classes[one] == SPACE) and (two >= ASCII_END or classes[two] == SPACE)
