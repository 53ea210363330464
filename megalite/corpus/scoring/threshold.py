"""Which scores are good enough: a fixed threshold, the best fraction of a whole corpus, or a soft Pareto rule.

A fraction asks for the k-th best of all scores, which no shard knows alone. So scores are written first, one .npy a
shard, and the threshold is found over all of them, exactly and in little memory, by histograms that refine each other:

    score -> integer of the same order    0x3F4A 81C2
    pass 1    count the upper 16 bits     the k-th best lies in bin 0x3F4A, and is the r-th best there
    pass 2    count the lower 16 bits     of the scores in that bin: the r-th best is 0x81C2

float32 takes two passes and float64 four, each over memory-mapped files with 65,536 counters. Sums of counts do not
care how documents are shared out, so the threshold is the same for any number of shards and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from megalite.errors import DataError
from megalite.stations.tasks import replacing
from megalite.texts import Texts

BITS_PER_PASS = 16

CHUNK_SCORES = 1 << 20
"""Scores in memory at once."""


class Scorer(Protocol):
    """A model that scores documents, as `NgramModel` and `Classifier` do."""

    higher_is_better: bool

    def score(self, texts: Texts) -> np.ndarray:
        """float32 or float64 [texts], never NaN."""
        ...


@dataclass(frozen=True)
class Threshold:
    """The worst score that is kept."""

    value: float
    higher_is_better: bool

    def keeps(self, scores: np.ndarray) -> np.ndarray:
        """bool [documents]"""
        value = scores.dtype.type(self.value)
        return scores >= value if self.higher_is_better else scores <= value


def write_scores(path: Path, scores: np.ndarray) -> None:
    """Leave the scores of one shard, in the order of its documents.

    Raises:
        DataError: a score is not a number.
    """
    if num_bad := int(np.isnan(scores).sum()):
        raise DataError(
            f"{path}: {num_bad} of {scores.size} scores are not a number; the model is damaged, train it again"
        )
    with replacing(path) as partial, open(partial, "wb") as file:
        np.save(file, scores, allow_pickle=False)


def best_fraction(paths: Sequence[Path], keep_fraction: float, *, higher_is_better: bool) -> Threshold:
    """The threshold that keeps the best fraction of all documents.

    Of n documents ceil(keep_fraction * n) are kept, and whatever ties with the last of them: which of equal documents
    comes first would depend on their order.

    Args:
        paths: scores of the shards, as `write_scores` leaves them, all of one dtype.
        keep_fraction: above 0, at most 1.
        higher_is_better: whether the best scores are the highest.

    Raises:
        DataError: there are no scores, or not all of one dtype.
    """
    shards = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    dtypes = {shard.dtype for shard in shards}
    num_scores = sum(shard.size for shard in shards)
    if len(dtypes) > 1:
        raise DataError(f"scores of {sorted(map(str, dtypes))} side by side; they come of two models: score all again")
    if num_scores == 0:
        raise DataError("there are no documents to keep a fraction of; look at what the stations before have rejected")
    dtype = dtypes.pop()
    # as written in decimals: 0.1 of 30 is 3, while the float nearest to 0.1 times 30 lies a little above
    num_kept = math.ceil(Fraction(repr(keep_fraction)) * num_scores)
    key = _select(shards, num_scores - num_kept if higher_is_better else num_kept - 1)
    return Threshold(_from_key(key, dtype), higher_is_better)


def pareto_keeps(scores: np.ndarray, texts: Texts, *, alpha: float, seed: int) -> np.ndarray:
    """Keep a document when a Pareto number exceeds 1 - score, as GPT-3 did (Brown et al. 2020, appendix A).

    The number is numpy's `pareto`, a Lomax variable: P(number > x) = (1 + x)^-alpha. So a document is kept with
    probability (2 - score)^-alpha: always at score 1, and at 0 with alpha = 9 one of 512 times. It is drawn from a hash
    of the text, so a text meets the same fate in every run and shard.

    Args:
        scores: float [documents], in [0, 1], higher is better.
        texts: the documents.
        alpha: shape; larger is stricter.
        seed: another seed keeps others.

    Returns:
        bool [documents]
    """
    hashes = [xxhash.xxh3_64_intdigest(texts.bytes_of(index), seed) for index in range(len(texts))]
    uniform = (np.array(hashes, np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
    return uniform < (2.0 - scores.astype(np.float64)) ** -alpha


def _select(shards: Sequence[np.ndarray], rank: int) -> int:
    """Key of the score of a rank, counted from 0 at the lowest."""
    num_bits = 8 * shards[0].dtype.itemsize
    prefix = 0
    for shift in range(num_bits - BITS_PER_PASS, -1, -BITS_PER_PASS):
        counts = np.zeros(1 << BITS_PER_PASS, np.int64)
        for keys in _keys(shards):
            digits = keys >> keys.dtype.type(shift)
            inside = digits >> keys.dtype.type(BITS_PER_PASS) == prefix
            counts += np.bincount(digits[inside].astype(np.int64) & (counts.size - 1), minlength=counts.size)
        up_to = np.cumsum(counts)
        digit = int(np.searchsorted(up_to, rank, side="right"))
        rank -= int(up_to[digit] - counts[digit])
        prefix = (prefix << BITS_PER_PASS) | digit
    return prefix


def _keys(shards: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """All scores as unsigned integers of the same order, chunk by chunk.

    A float with its sign bit clear orders like its bits. Setting the sign bit puts it above the negative ones, whose
    order is turned round by flipping all bits. Adding 0 makes -0 a 0.
    """
    for shard in shards:
        unsigned = np.dtype(f"u{shard.dtype.itemsize}")
        sign = unsigned.type(1 << (8 * unsigned.itemsize - 1))
        for begin in range(0, shard.size, CHUNK_SCORES):
            bits = (shard[begin : begin + CHUNK_SCORES] + shard.dtype.type(0)).view(unsigned)
            yield np.where(bits & sign, ~bits, bits | sign)


def _from_key(key: int, dtype: np.dtype) -> float:
    """The score of a key."""
    num_bits = 8 * dtype.itemsize
    sign = 1 << (num_bits - 1)
    bits = key ^ sign if key & sign else key ^ ((1 << num_bits) - 1)
    return float(np.array(bits, f"u{dtype.itemsize}").view(dtype))
