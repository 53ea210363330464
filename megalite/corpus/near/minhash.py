"""MinHash signatures of word n-grams, by throwing shingles into bins until none is empty.

    text       "The cat, the CAT sat."
    words      the cat the cat sat               runs of letters and digits, ASCII in lower case
    shingles   the-cat-the  cat-the-cat ...      every `ngram` words in a row, as one 64-bit hash
    turn 0     [ 7| .| 3| .| .| 9| 1| .]         each falls into one bin; the smallest value in a bin stays
    turn 1     [ 7| .| 3| 2| 8| 9| 1| .]         all are thrown again, elsewhere; only empty bins take one
    turn 2     [ 7| 4| 3| 2| 8| 9| 1| 5]         all bins are full: the signature

The share of equal values of two signatures estimates the Jaccard similarity of the two sets of shingles. A classic
signature takes num_hashes permutations, so num_hashes multiplications a shingle. Here a long document takes one (one
permutation hashing, Li, Owen and Zhang 2012), and a short one some 6 x num_hashes in all, however short it is (fast
similarity sketching, Dahlgaard, Knudsen and Thorup 2017). The value that the union of two sets would have in a bin,
the smallest of the earliest turn, is equally likely to come from any of its elements, and both documents have it if
that element is in both; so the values agree with probability Jaccard, whatever the length. And the variance is that of
num_hashes independent permutations or less: few shingles share the bins evenly, many are drawn without replacement.

The known alternative, densification, lets an empty bin borrow the value of another one. Of two shingles that meet in a
bin the loser is then lost altogether: of the pairs of documents of three shingles, one in a hundred would be misjudged
by a third. It was no faster.

Bytes from 128 on count as letters, so that UTF-8 words stay whole. Scripts that write no blanks between words yield a
word a phrase, and find only documents that share whole phrases. A document of fewer words than `ngram` is one shingle;
one without words has none, its signature is all EMPTY, and it is like no other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.kernel import kernel
from megalite.texts import Texts

EMPTY = np.uint32(0xFFFFFFFF)
"""Value of a document without shingles. Those of shingles are even, so none equals it."""

_VALUE_BITS = np.uint64(0xFFFFFFFE)
_HALF = np.uint64(32)
_NO_TURN = np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD_FACTOR = np.uint64(0x100000001B3)
_ORDER_FACTOR = np.uint64(0xD1342543DE82EF95)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _letter_table() -> np.ndarray:
    """uint8 [256]: what a byte counts as inside a word, 0 where it ends one."""
    table = np.zeros(256, np.uint8)
    for byte in range(256):
        if byte >= 128 or chr(byte).isalnum():
            table[byte] = ord(chr(byte).lower()) if byte < 128 else byte
    return table


LETTERS = _letter_table()


class ShingleSets(NamedTuple):
    """The shingles of some documents, each set sorted."""

    values: np.ndarray
    """uint32 [shingles]: the sets end to end."""
    borders: np.ndarray
    """int64 [documents + 1]: where each begins."""


class MinHasher:
    """Makes signatures that can be compared with those of any equal hasher.

    Args:
        num_hashes: values in a signature.
        ngram: words in a shingle.
        seed: of the hash.
    """

    def __init__(self, num_hashes: int, ngram: int, seed: int):
        self._num_hashes = num_hashes
        self._ngram = ngram
        self._seed = np.uint64(mix(np.uint64((seed + int(_MIX_1)) % 2**64)))

    def signatures(self, texts: Texts) -> np.ndarray:
        """uint32 [texts, num_hashes]"""
        return _sign(*_frozen(texts), self._ngram, self._seed, self._num_hashes)

    def shingle_sets(self, texts: Texts) -> ShingleSets:
        """The sets themselves, as 32-bit hashes: what the signatures are samples of."""
        tagged = _tag_shingles(*_frozen(texts), self._ngram, self._seed)
        tagged.sort()  # all at once: numpy sorts with vector instructions, ten times as fast as numba
        tagged = tagged[np.append(True, tagged[1:] != tagged[:-1])[: tagged.size]]
        borders = np.searchsorted(tagged, np.arange(len(texts) + 1, dtype=np.uint64) << _HALF)
        return ShingleSets(tagged.astype(np.uint32), borders)


def _frozen(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Read-only views, as Arrow's arrays are: numba compiles a function once more for arrays that may be written."""
    views = texts.buffer.view(), texts.offsets.view()
    for view in views:
        view.flags.writeable = False
    return views


@kernel
def mix(value: np.uint64) -> np.uint64:
    """A bijection in which every bit of the value changes every bit of the result (Steele et al. 2014, SplitMix)."""
    value ^= value >> np.uint64(30)
    value *= _MIX_1
    value ^= value >> np.uint64(27)
    value *= _MIX_2
    return value ^ (value >> np.uint64(31))


@kernel
def _hash_words(text: np.ndarray, words: np.ndarray) -> int:
    """Hash each word of a text (FNV-1a with a final shuffle); returns their number."""
    num_words = 0
    state = np.uint64(0)
    inside = False
    for byte in text:
        letter = LETTERS[byte]
        if letter != 0:
            state = (state ^ np.uint64(letter)) * _WORD_FACTOR
            inside = True
        elif inside:
            words[num_words] = (state ^ (state >> _HALF)) * _MIX_2
            num_words += 1
            state = np.uint64(0)
            inside = False
    if inside:
        words[num_words] = (state ^ (state >> _HALF)) * _MIX_2
        num_words += 1
    return num_words


@kernel
def _hash_shingles(words: np.ndarray, num_words: int, ngram: int, seed: np.uint64, shingles: np.ndarray) -> int:
    """Hash every `ngram` words in a row; returns their number.

    The words are digits of a number in base _ORDER_FACTOR modulo 2^64: the next window drops the first digit, and adds
    one at the end.
    """
    if num_words == 0:
        return 0
    width = min(ngram, num_words)
    state = np.uint64(0)
    leading = np.uint64(1)
    for index in range(width):
        state = state * _ORDER_FACTOR + words[index]
        leading *= _ORDER_FACTOR
    shingles[0] = mix(state ^ seed)
    for index in range(width, num_words):
        state = state * _ORDER_FACTOR + words[index] - leading * words[index - width]
        shingles[index - width + 1] = mix(state ^ seed)
    return num_words - width + 1


@kernel
def _fill_bins(shingles: np.ndarray, bins: np.ndarray) -> None:
    """Throw the shingles until no bin is empty.

    A bin holds its turn in the high and its value in the low 32 bits, so the smallest one is of the earliest turn.
    After num_bins turns, each further one throws all into one bin, so that it ends for a single shingle too.
    """
    num_bins = np.uint64(bins.size)
    bins[:] = _NO_TURN
    first_empty = 0
    for turn in range(2 * bins.size):
        factor = mix(np.uint64(turn)) | np.uint64(1)
        stamp = np.uint64(turn) << _HALF
        if turn < bins.size:
            for shingle in shingles:
                thrown = shingle * factor
                chosen = np.int64(((thrown >> _HALF) * num_bins) >> _HALF)
                bins[chosen] = min(bins[chosen], stamp | (thrown & _VALUE_BITS))
        else:
            chosen = turn - bins.size
            for shingle in shingles:
                bins[chosen] = min(bins[chosen], stamp | ((shingle * factor) & _VALUE_BITS))
        while first_empty < bins.size and bins[first_empty] != _NO_TURN:
            first_empty += 1
        if first_empty == bins.size:
            break


@kernel
def _most_words(offsets: np.ndarray) -> int:
    """Room for the words of the longest text: a word takes a letter and a blank."""
    longest = 0
    for number in range(offsets.size - 1):
        longest = max(longest, offsets[number + 1] - offsets[number])
    return longest // 2 + 1


@kernel
def _sign(buffer: np.ndarray, offsets: np.ndarray, ngram: int, seed: np.uint64, num_hashes: int) -> np.ndarray:
    """Signatures of all texts, uint32 [texts, num_hashes]."""
    num_texts = offsets.size - 1
    signatures = np.full((num_texts, num_hashes), EMPTY)
    words = np.empty(_most_words(offsets), np.uint64)
    shingles = np.empty(words.size, np.uint64)
    bins = np.empty(num_hashes, np.uint64)
    for number in range(num_texts):
        num_words = _hash_words(buffer[offsets[number] : offsets[number + 1]], words)
        num_shingles = _hash_shingles(words, num_words, ngram, seed, shingles)
        if num_shingles > 0:
            _fill_bins(shingles[:num_shingles], bins)
            for place in range(num_hashes):
                signatures[number, place] = np.uint32(bins[place] & _VALUE_BITS)
    return signatures


@kernel
def _tag_shingles(buffer: np.ndarray, offsets: np.ndarray, ngram: int, seed: np.uint64) -> np.ndarray:
    """The shingles of all texts, uint64: the number of the text in the high 32 bits, the hash in the low ones."""
    num_texts = offsets.size - 1
    words = np.empty(_most_words(offsets), np.uint64)
    shingles = np.empty(words.size, np.uint64)
    tagged = np.empty((offsets[-1] - offsets[0]) // 2 + num_texts, np.uint64)
    end = 0
    for number in range(num_texts):
        num_words = _hash_words(buffer[offsets[number] : offsets[number + 1]], words)
        num_shingles = _hash_shingles(words, num_words, ngram, seed, shingles)
        for shingle in shingles[:num_shingles]:
            tagged[end] = (np.uint64(number) << _HALF) | (shingle >> _HALF)
            end += 1
    return tagged[:end]
