"""Interpolated modified Kneser-Ney: probabilities of n-grams from the words of sample texts.

Source: Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 3; with the
counts and the treatment of pruned n-grams as in Heafield et al. 2013, "Scalable modified Kneser-Ney language model
estimation" (KenLM). For a word w after a context h, with h' the context without its first word:

    p(w | h) = (a(hw) - D(a(hw))) / A(h)  +  b(h) p(w | h')      with 1 / V in place of p(w | h') when h is empty

    a(g)  adjusted count: how often g occurs, when g is of the highest order or begins a line; else how many different
          words stand to the left of it, since a lower order is asked only where the longer context is new
    A(h)  sum of a(hx) over all words x
    D(a)  discount: D(1), D(2), and D(3) for 3 and more; D(j) = j - (j + 1) (t1 / (t1 + 2 t2)) (t[j+1] / t[j]),
          where t[j] is the number of n-grams of the order with a = j
    b(h)  what discounts and pruning leave over: (sum of D(a(hx)) over kept x + sum of a(hx) over pruned x) / A(h)

For n-grams that were never seen, or were pruned, p(w | h) = b(h) p(w | h'), with b = 1 for a context never seen.

Everything is arrays: an n-gram is a row, and refers to the rows of its suffix and of its context in the order below.
Nothing is hashed but the words. Memory: about 100 bytes a word of the sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.corpus.scoring.words import LINE_END, LINE_START, UNKNOWN

UNKNOWN_ID, START_ID, END_ID = 0, 1, 2
"""Rows of the first order that every model has. Words follow, sorted by hash."""

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Where a sample is too small or too even for the formula, as KenLM's --discount_fallback."""

_LEFT_BITS = np.uint64(32)
_LEFT_MASK = np.uint64((1 << 32) - 1)


@dataclass(frozen=True)
class NgramOrder:
    """The n-grams of one order that a model keeps, sorted by (suffix, left)."""

    suffix: np.ndarray
    """int64 [grams], row of the n-gram without its first word in the order below; zeros for single words."""
    left: np.ndarray
    """int64 [grams], word (row of the first order) at its beginning; for single words the row itself."""
    probability: np.ndarray
    """float64 [grams], p(last word | the others)."""
    backoff: np.ndarray
    """float64 [grams], b of the n-gram as a context; 1 where it is never one."""


@dataclass(frozen=True)
class Estimates:
    """All that a model is made of."""

    words: np.ndarray
    """uint64 [vocabulary], hash of each row of the first order: UNKNOWN, LINE_START, LINE_END, then words ascending."""
    num_rare_words: int
    """How many different words of the sample became the unknown one."""
    orders: tuple[NgramOrder, ...]
    discounts: tuple[tuple[float, float, float], ...]
    """D(1), D(2), D(3) of each order."""
    fallbacks: tuple[int, ...]
    """Orders whose discounts are FALLBACK_DISCOUNTS."""


@dataclass(frozen=True)
class _NgramCounts:
    """All n-grams of one order in the sample."""

    suffix: np.ndarray
    left: np.ndarray
    context: np.ndarray
    """int64 [grams], row of the n-gram without its last word in the order below."""
    raw: np.ndarray
    """int64 [grams], occurrences."""


def estimate(stream: np.ndarray, *, order: int, min_word_count: int = 1, prune: Sequence[int] = ()) -> Estimates:
    """Estimate a model.

    Args:
        stream: uint64 [words], lines of hashed words as `hash_words` makes them; at least one line.
        order: longest n-gram, 2 or more.
        min_word_count: words that occur less often count as one unknown word.
        prune: for the orders from 2 on, n-grams with at most this many occurrences are not kept; growing, so that the
            suffix and the context of every n-gram that is kept are kept too. The last one holds for all higher orders.
    """
    words, num_rare_words, tokens = _number_words(stream, min_word_count)
    counts = _count(tokens, words.size, order)
    limits = [-1, *(prune[min(index, len(prune) - 1)] if prune else 0 for index in range(order - 1))]
    kept = [grams.raw > limit for grams, limit in zip(counts, limits, strict=True)]
    probabilities, backoffs, discounts, fallbacks = [], [], [], []
    below = np.array([1.0 / (words.size - 1)])  # uniform over all words; the start of a line is never predicted
    for grams, adjusted, keep in zip(counts, _adjusted_counts(counts), kept, strict=True):
        discount, by_formula = _discounts(adjusted)
        probability, backoff = _interpolate(grams, adjusted, keep, discount, below)
        probabilities.append(probability)
        backoffs.append(backoff)
        discounts.append(tuple(discount[1:].tolist()))
        if not by_formula:
            fallbacks.append(len(discounts))
        below = probability
    probabilities[0][START_ID] = 0.0
    backoffs = [*backoffs[1:], np.ones(below.size)]
    orders = _without_pruned(counts, kept, probabilities, backoffs)
    return Estimates(words, num_rare_words, orders, tuple(discounts), tuple(fallbacks))


def _number_words(stream: np.ndarray, min_word_count: int) -> tuple[np.ndarray, int, np.ndarray]:
    """The vocabulary, the number of words left out of it, and the stream as int32 rows of it."""
    hashes, _, numbers, counts = _distinct(stream)
    frequent = (hashes > UNKNOWN) & (counts >= min_word_count)
    specials = np.array([UNKNOWN, LINE_START, LINE_END], np.uint64)
    row_of = np.zeros(hashes.size, np.int32)  # UNKNOWN_ID, unless told otherwise
    row_of[frequent] = specials.size + np.arange(int(frequent.sum()))
    row_of[hashes == LINE_START] = START_ID
    row_of[hashes == LINE_END] = END_ID
    num_rare_words = int((~frequent & (hashes > UNKNOWN)).sum())
    return np.concatenate([specials, hashes[frequent]]), num_rare_words, row_of[numbers]


def _count(tokens: np.ndarray, num_words: int, order: int) -> list[_NgramCounts]:
    """Count the n-grams inside lines, order by order; each order refers to its n-grams' parts in the order below."""
    nothing = np.zeros(num_words, np.int64)
    counts = [_NgramCounts(nothing, np.arange(num_words), nothing, np.bincount(tokens, minlength=num_words))]
    ends = np.arange(tokens.size)
    row = tokens
    for length in range(2, order + 1):
        # the n-gram that is one word shorter lies inside a line, and this one does too unless that one begins it
        ends = ends[tokens[ends - (length - 2)] != START_ID]
        pairs = (row[ends].astype(np.uint64) << _LEFT_BITS) | tokens[ends - (length - 1)].astype(np.uint64)
        grams, first, numbers, raw = _distinct(pairs)
        suffix, left = (grams >> _LEFT_BITS).astype(np.int64), (grams & _LEFT_MASK).astype(np.int64)
        counts.append(_NgramCounts(suffix, left, row[ends[first] - 1].astype(np.int64), raw))
        row = np.full(tokens.size, -1, np.int32)
        row[ends] = numbers
    return counts


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As np.unique with all it can return, in half the memory.

    Args:
        keys: uint64 [n].

    Returns:
        The distinct keys, ascending; where each of them stands once, int64; which of them each key is, int32 [n]; how
        often each occurs, int64.
    """
    order = np.argsort(keys)
    in_order = keys[order]
    begins = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1])) if keys.size else np.zeros(0, np.int64)
    counts = np.diff(np.append(begins, keys.size))
    number = np.empty(keys.size, np.int32)
    number[order] = np.repeat(np.arange(begins.size, dtype=np.int32), counts)
    return in_order[begins], order[begins], number, counts


def _adjusted_counts(counts: Sequence[_NgramCounts]) -> list[np.ndarray]:
    """a of every n-gram, int64 [grams] for each order."""
    adjusted = []
    for grams, above in itertools.pairwise(counts):
        continuations = np.bincount(above.suffix, minlength=grams.raw.size)
        adjusted.append(np.where(grams.left == START_ID, grams.raw, continuations))
    adjusted[0][START_ID] = 0
    return [*adjusted, counts[-1].raw]


def _discounts(adjusted: np.ndarray) -> tuple[np.ndarray, bool]:
    """D(0) = 0, D(1), D(2), D(3), and whether the formula gave them."""
    t = np.bincount(adjusted[adjusted <= 4], minlength=5)
    if (t[1:] > 0).all():
        share = t[1] / (t[1] + 2 * t[2])
        formula = np.array([0.0, *(j - (j + 1) * share * t[j + 1] / t[j] for j in (1, 2, 3))])
        if (formula[1:] > 0.0).all():
            return formula, True
    return np.array([0.0, *FALLBACK_DISCOUNTS]), False


def _interpolate(
    grams: _NgramCounts, adjusted: np.ndarray, kept: np.ndarray, discount: np.ndarray, below: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of the n-grams of one order, and the backoffs of the n-grams in the order below.

    Args:
        adjusted: a of each.
        kept: which are not pruned.
        discount: D(0), D(1), D(2), D(3).
        below: float64 [grams below], probabilities.
    """
    removed = np.where(kept, discount[np.minimum(adjusted, 3)], adjusted)
    total = np.bincount(grams.context, adjusted, minlength=below.size)
    left_over = np.bincount(grams.context, removed, minlength=below.size)
    backoff = np.divide(left_over, total, out=np.ones(below.size), where=total > 0)
    own = np.divide(adjusted - removed, total[grams.context], out=np.zeros(kept.size), where=adjusted > 0)
    return own + backoff[grams.context] * below[grams.suffix], backoff


def _without_pruned(
    counts: Sequence[_NgramCounts],
    kept: Sequence[np.ndarray],
    probabilities: Sequence[np.ndarray],
    backoffs: Sequence[np.ndarray],
) -> tuple[NgramOrder, ...]:
    """The n-grams that are kept, numbered anew."""
    orders = []
    row_below = np.zeros(1, np.int64)
    for grams, keep, probability, backoff in zip(counts, kept, probabilities, backoffs, strict=True):
        orders.append(NgramOrder(row_below[grams.suffix[keep]], grams.left[keep], probability[keep], backoff[keep]))
        row_below = np.cumsum(keep) - 1
    return tuple(orders)
