"""The loops of the linear classifier: features of texts, their logits, and the loss over a training set.

The features are single words and pairs of neighbours in a line, each hashed into one of 2^hash_bits buckets (the
hashing trick, Weinberger et al. 2009). A text is the mean of its features, as in fastText (Joulin et al. 2017), so a
score does not grow with the length of the text:

    logit = bias + (sum of weights[bucket] over all features) / features

A training set is in compressed rows: text i has buckets[borders[i] : borders[i + 1]], and shares of the text beside.
"""

from __future__ import annotations

import numpy as np

from megalite.corpus.scoring.words import UNKNOWN
from megalite.kernel import kernel

_PAIR_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@kernel
def logits(stream: np.ndarray, borders: np.ndarray, weights: np.ndarray, bias: float) -> np.ndarray:
    """The classifier's output before the sigmoid.

    Args:
        stream: uint64 [words], as `hash_words` makes it.
        borders: int64 [texts + 1], where in it each text begins.
        weights: float32 [2^hash_bits].
        bias: added to the mean.

    Returns:
        float64 [texts]; minus infinity for a text without a word.
    """
    mask = np.uint64(weights.size - 1)
    result = np.full(borders.size - 1, -np.inf)
    for text in range(result.size):
        total, num_features = 0.0, 0
        for index in range(borders[text], borders[text + 1]):
            if stream[index] > UNKNOWN:  # a line begins with a mark, so there is something before a word
                total += weights[stream[index] & mask]
                num_features += 1
                if stream[index - 1] > UNKNOWN:
                    total += weights[_pair(stream[index - 1], stream[index]) & mask]
                    num_features += 1
        if num_features > 0:
            result[text] = bias + total / num_features
    return result


@kernel
def extract(stream: np.ndarray, borders: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The features of texts, in compressed rows.

    Args:
        stream: uint64 [words].
        borders: int64 [texts + 1].
        num_buckets: a power of two.

    Returns:
        borders int64 [texts + 1]; buckets uint32 [features], ascending and distinct in each text; shares float32.
    """
    mask = np.uint64(num_buckets - 1)
    rows = np.zeros(borders.size, np.int64)
    buckets, shares = np.empty(2 * stream.size, np.uint32), np.empty(2 * stream.size, np.float32)
    size = 0
    for text in range(borders.size - 1):
        found = np.empty(2 * (borders[text + 1] - borders[text]), np.uint32)
        num_features = 0
        for index in range(borders[text], borders[text + 1]):
            if stream[index] > UNKNOWN:
                found[num_features] = stream[index] & mask
                num_features += 1
                if stream[index - 1] > UNKNOWN:
                    found[num_features] = _pair(stream[index - 1], stream[index]) & mask
                    num_features += 1
        found = np.sort(found[:num_features])
        first = 0
        for last in range(num_features):
            if last + 1 == num_features or found[last + 1] != found[last]:
                buckets[size] = found[last]
                shares[size] = (last + 1 - first) / num_features
                size += 1
                first = last + 1
        rows[text + 1] = size
    return rows, buckets[:size].copy(), shares[:size].copy()


@kernel
def row_logits(borders: np.ndarray, buckets: np.ndarray, shares: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean weight of each text of a training set, float64 [texts]; no bias."""
    result = np.zeros(borders.size - 1, np.float64)
    for text in range(result.size):
        for index in range(borders[text], borders[text + 1]):
            result[text] += shares[index] * weights[buckets[index]]
    return result


@kernel
def spread(
    borders: np.ndarray, buckets: np.ndarray, shares: np.ndarray, slopes: np.ndarray, num_buckets: int
) -> np.ndarray:
    """The transpose of `row_logits`: gradient by weight, float64 [num_buckets], from the gradient by logit."""
    gradient = np.zeros(num_buckets, np.float64)
    for text in range(borders.size - 1):
        for index in range(borders[text], borders[text + 1]):
            gradient[buckets[index]] += shares[index] * slopes[text]
    return gradient


@kernel
def _pair(left: np.uint64, right: np.uint64) -> np.uint64:
    """Hash of two neighbours: other bits of the left one than those that choose its own bucket."""
    return (left >> _HALF) * _PAIR_FACTOR + right
