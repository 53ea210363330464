"""What each chunk between blanks falls into: cut once in Python, looked up by the kernels ever after.

    text      don't (x)        hash of a chunk -> its words       don't  do n't
              ^^^^^ ^^^                                           (x)    ( x )
    words     do n't ( x )     hash, characters and kind of each

A text has far fewer different chunks than chunks, so the cutting, which is slow, is hardly met once some megabytes have
been read. Chunks of ASCII letters are words as they are, unless the cutter says otherwise, and are not remembered.

A word is known by a polynomial of its characters modulo 2^64, and so is a run of words as the one string that they
make: hash(a + b) = hash(a) * BASE^len(b) + hash(b).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megalite.corpus.rules.characters import BLANK, character_classes, decode
from megalite.corpus.rules.duplicates import SPREAD
from megalite.corpus.rules.punctuation import PUNCTUATION_MARKS
from megalite.kernel import bare_kernel, read_only
from megalite.texts import Texts

BASE = np.uint64(0xD6E8FEB86659FD93)

HAS_LETTER = 1
"""str.isalpha of some character"""
IS_NO_SYMBOL = 2
"""Some character is neither punctuation nor a control character, by datatrove's list"""
ENDS_SENTENCE = 4
"""It is a full stop or the like of some script"""
IS_PUNCTUATION = 8
"""All characters are of Unicode's category P"""

LETTERS = HAS_LETTER | IS_NO_SYMBOL
"""Kind of a word of ASCII letters."""

MAX_CHUNKS = 1 << 20
"""Chunks to remember, some 100 MB of them; with more all are forgotten, and learnt again as they come."""

CHUNKS_AT_ONCE = 1 << 14

LONGEST_TO_REMEMBER = 64
"""Characters of a word whose hash and kind are remembered; a longer one hardly comes again."""

Cut = Callable[[str], Sequence[str]]
"""A chunk's words."""


class Entries(NamedTuple):
    """The chunks that are known, as the kernels see them."""

    slots: np.ndarray
    """int32 [a power of two]: an open hash table of numbers of chunks, -1 where it is free."""
    keys: np.ndarray
    """uint64 [chunks]: the hash of each."""
    begins: np.ndarray
    """int64 [chunks + 1]: its first word. The words' arrays follow."""
    hashes: np.ndarray
    """uint64 [words]"""
    num_chars: np.ndarray
    """int32 [words]"""
    kinds: np.ndarray
    """uint8 [words]: flags."""


class ChunkTable(NamedTuple):
    """The chunks that are known, to enter more of them; the arrays as in `Entries`."""

    slots: np.ndarray
    keys: np.ndarray
    num_chunks: int


class Lexicon:
    """Remembers how chunks are cut.

    Args:
        cut: a chunk's words; joined they are the chunk.
        cases: chunks of ASCII letters that are cut.
        end_marks: words that end a sentence.
    """

    def __init__(self, cut: Cut, cases: Sequence[str], end_marks: Set[str]):
        self._cut = cut
        self._cases = [case for case in cases if case.isascii() and case.isalpha()]
        self._end_marks = end_marks
        self._forget()

    def learn(self, texts: Texts) -> Entries:
        """All chunks of some texts, and those of earlier ones."""
        if self._num_chunks > MAX_CHUNKS:
            self._forget()
        return self._learn(texts, knows_letters=True)

    def _forget(self) -> None:
        self._num_chunks = self._num_words = 0
        self._keys = np.empty(CHUNKS_AT_ONCE, np.uint64)
        self._begins = np.zeros(CHUNKS_AT_ONCE + 1, np.int64)
        self._hashes, self._num_chars = np.empty(CHUNKS_AT_ONCE, np.uint64), np.empty(CHUNKS_AT_ONCE, np.int32)
        self._kinds = np.empty(CHUNKS_AT_ONCE, np.uint8)
        self._slots = np.full(4 * CHUNKS_AT_ONCE, -1, np.int32)
        self._learn(Texts.of([" ".join(self._cases)]), knows_letters=False)

    def _learn(self, texts: Texts, *, knows_letters: bool) -> Entries:
        buffer, offsets = read_only(texts.buffer), read_only(texts.offsets)
        spans = np.empty((CHUNKS_AT_ONCE, 2), np.int64)
        place, document = np.int64(texts.offsets[0]), np.int64(0)
        while place < texts.offsets[-1]:
            self._make_room()
            found, place, document = find_unknown(
                buffer, offsets, place, document, character_classes(), knows_letters,
                ChunkTable(self._slots, self._keys, self._num_chunks), spans,
            )  # fmt: skip
            for start, end in spans[:found].tolist():
                self._add(self._cut(texts.buffer[start:end].tobytes().decode()))
        arrays: list[np.ndarray] = [self._slots, self._keys, self._begins, *self._words]
        return Entries(*map(read_only, arrays))

    @property
    def _words(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._hashes, self._num_chars, self._kinds

    def _make_room(self) -> None:
        """For CHUNKS_AT_ONCE more."""
        if self._num_chunks + CHUNKS_AT_ONCE > self._keys.size:
            self._keys, self._begins = _doubled(self._keys), _doubled(self._begins)
            self._slots = np.full(4 * self._keys.size, -1, np.int32)
            fill(self._slots, self._keys, self._num_chunks)

    def _add(self, words: Sequence[str]) -> None:
        """The words of the next chunk, whose key is there already."""
        end = self._num_words + len(words)
        while end > self._hashes.size:
            self._hashes, self._num_chars, self._kinds = map(_doubled, self._words)
        for number, word in enumerate(words, self._num_words):
            describe = _describe if len(word) <= LONGEST_TO_REMEMBER else _describe.__wrapped__
            self._hashes[number], self._kinds[number] = describe(word, word in self._end_marks)
            self._num_chars[number] = len(word)
        self._num_words = end
        self._num_chunks += 1
        self._begins[self._num_chunks] = end


@lru_cache(maxsize=1 << 16)
def _describe(word: str, ends_sentence: bool) -> tuple[int, int]:
    """Hash and kind of a word."""
    hashed, base, mask = 0, int(BASE), (1 << 64) - 1
    for character in word:
        hashed = (hashed * base + ord(character) + 1) & mask
    kind = HAS_LETTER * any(map(str.isalpha, word))
    kind |= IS_NO_SYMBOL * (not PUNCTUATION_MARKS.issuperset(word))
    kind |= ENDS_SENTENCE * ends_sentence
    kind |= IS_PUNCTUATION * all(unicodedata.category(character)[0] == "P" for character in word)
    return hashed, kind


def hash_of_word(word: str) -> int:
    """The hash by which a word is known."""
    return _describe(word, False)[0]


def _doubled(array: np.ndarray) -> np.ndarray:
    larger = np.empty(2 * array.size, array.dtype)
    larger[: array.size] = array
    return larger


@bare_kernel
def next_chunk(buffer: np.ndarray, at: int, end: int, classes: np.ndarray) -> tuple[int, int, np.uint64, int, bool]:
    """The first chunk from a place on: start, end, hash, number of characters, and whether all are ASCII letters."""
    while at < end:
        point, after = decode(buffer, at)
        if not classes[point] & BLANK:
            break
        at = after
    start, hashed, chars, is_letters = at, np.uint64(0), 0, True
    while at < end:
        point, after = decode(buffer, at)
        if classes[point] & BLANK:
            break
        hashed = hashed * BASE + np.uint64(point + 1)
        is_letters &= 97 <= point | 32 <= 122
        chars += 1
        at = after
    return start, at, hashed, chars, is_letters


@bare_kernel
def find_slot(slots: np.ndarray, keys: np.ndarray, key: np.uint64) -> int:
    """The slot of a key, or the free one where it belongs."""
    mask = slots.size - 1
    slot = np.int64((key * SPREAD) >> np.uint64(32)) & mask
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@bare_kernel
def fill(slots: np.ndarray, keys: np.ndarray, num_chunks: int) -> None:
    """Enter chunks into an empty table."""
    for number in range(num_chunks):
        slots[find_slot(slots, keys, keys[number])] = number


@bare_kernel
def find_unknown(
    buffer: np.ndarray,
    offsets: np.ndarray,
    place: int,
    document: int,
    classes: np.ndarray,
    knows_letters: bool,
    table: ChunkTable,
    spans: np.ndarray,
) -> tuple[int, int, int]:
    """Enter the chunks that are not in the table, as long as there is room in `spans` for their places.

    Returns:
        How many were found, and the place and the document to go on from.
    """
    found = 0
    while document < offsets.size - 1:
        end = offsets[document + 1]
        while place < end:
            start, place, key, _, is_letters = next_chunk(buffer, place, end, classes)
            if start == place:
                break
            slot = find_slot(table.slots, table.keys, key)
            if table.slots[slot] >= 0 or (knows_letters and is_letters):
                continue
            table.slots[slot] = table.num_chunks + found
            table.keys[table.num_chunks + found] = key
            spans[found, 0], spans[found, 1] = start, place
            found += 1
            if found == len(spans):
                return found, place, document
        place = end
        document += 1
    return found, place, document
