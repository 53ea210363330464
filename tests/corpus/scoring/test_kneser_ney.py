"""Kneser-Ney: the arrays hold what the formulas say, and every distribution sums to one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.scoring.kneser_ney import END_ID, START_ID, UNKNOWN_ID, Estimates, estimate
from megalite.corpus.scoring.words import hash_words
from megalite.texts import Texts
from tests.corpus.scoring.plain_kneser_ney import END, START, UNKNOWN, PlainKneserNey, plain_lines

ROUNDING = 1e-9
"""Both sides compute in float64."""

SAMPLES = st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=8).map(" ".join), min_size=1, max_size=40)

PRUNES = st.sampled_from([(), (0,), (1,), (0, 1), (0, 1, 2), (1, 1, 2, 3)])


def zipf_lines(num_lines: int, *, seed: int) -> list[str]:
    """Lines of words of very different frequency, in which short sequences repeat."""
    rng = np.random.default_rng(seed)
    phrases = [" ".join(f"v{word}" for word in rng.zipf(1.3, rng.integers(1, 6)) % 9973) for _ in range(1000)]
    letters = str.maketrans("0123456789", "abcdefghij")  # digits would all be one word
    return [
        " ".join(phrases[index % 1000] for index in rng.zipf(1.2, rng.integers(1, 6))).translate(letters)
        for _ in range(num_lines)
    ]


def estimate_lines(lines: list[str], **options) -> Estimates:
    texts = Texts.of(["\n".join(lines)])
    return estimate(hash_words(texts.buffer, texts.offsets)[0], **options)


def names_of(estimates: Estimates, words: list[str]) -> dict[int, str]:
    """Row of the first order to word."""
    texts = Texts.of(words)
    hashes = hash_words(texts.buffer, texts.offsets)[0][1::3]
    row = {int(hash_): index for index, hash_ in enumerate(estimates.words)}
    return {UNKNOWN_ID: UNKNOWN, START_ID: START, END_ID: END} | {
        row[int(hash_)]: word for hash_, word in zip(hashes, words, strict=True)
    }


def all_grams(estimates: Estimates, words: list[str]) -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Every n-gram in words, with its probability and backoff."""
    name = names_of(estimates, words)
    below: list[tuple[str, ...]] = [()]
    for order in estimates.orders:
        grams = [
            (name[left], *below[suffix])
            for left, suffix in zip(order.left.tolist(), order.suffix.tolist(), strict=True)
        ]
        yield from zip(grams, order.probability.tolist(), order.backoff.tolist(), strict=True)
        below = grams


def compare(lines: list[str], order: int, min_word_count: int, prune: tuple[int, ...]) -> PlainKneserNey:
    """Assert that both ways give the same model."""
    plain = PlainKneserNey(plain_lines("\n".join(lines)), order, min_word_count, prune)
    estimates = estimate_lines(lines, order=order, min_word_count=min_word_count, prune=prune)
    table = {gram: (p, b) for gram, p, b in all_grams(estimates, sorted(plain.known))}
    assert set(table) == (set(plain.adjusted) - plain.pruned) | {(UNKNOWN,), (START,)}
    for gram, (probability, backoff) in table.items():
        expected = 0.0 if gram == (START,) else plain.probability(gram)
        assert probability == pytest.approx(expected, rel=ROUNDING)
        assert backoff == pytest.approx(plain.backoff(gram), rel=ROUNDING)
    assert np.allclose(estimates.discounts, [plain.discounts[length][1:] for length in range(1, order + 1)])

    def probability(gram: tuple[str, ...]) -> float:
        if gram in table:
            return table[gram][0]
        return table.get(gram[:-1], (0.0, 1.0))[1] * probability(gram[1:])

    contexts = [gram for gram in table if len(gram) < order and gram[-1] != END]
    for context in [(), *contexts[:: max(1, len(contexts) // 50)]]:
        assert sum(probability((*context, word)) for word in plain.vocabulary) == pytest.approx(1.0, rel=ROUNDING)
    return plain


@given(lines=SAMPLES, order=st.integers(2, 5), min_word_count=st.integers(1, 3), prune=PRUNES)
@settings(max_examples=150, deadline=None)
def test_small_samples_equal_the_plain_model(lines, order, min_word_count, prune):
    """Every n-gram kept, its probability and its backoff; and the words after any context sum to one."""
    compare(lines, order, min_word_count, prune)


@pytest.mark.parametrize("prune", [(), (0, 1, 2)])
def test_a_larger_sample_uses_the_formula_of_the_discounts(prune):
    """Enough text that no order falls back, with and without pruning."""
    lines = zipf_lines(1500, seed=1)
    plain = compare(lines, 4, 2, prune)
    assert estimate_lines(lines, order=4, min_word_count=2).fallbacks == ()
    assert 0 < plain.discounts[4][1] < 1


def test_a_sample_too_small_says_that_it_fell_back():
    """The orders without enough n-grams are named."""
    assert estimate_lines(["a b c"], order=3).fallbacks == (1, 2, 3)
