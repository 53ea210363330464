"""Signatures: the shingles against sets of strings, and the estimates against the statistics of fair coins."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.near.curve import collision_probability
from megalite.corpus.near.minhash import EMPTY, MinHasher, _fill_bins, mix
from megalite.texts import Texts
from tests.corpus.near.truth import edited, jaccard, shingles, words

NUM_HASHES = 256

SIGMAS = 5.0
"""A single estimate is this many standard errors off once in 1.7 million."""

RANDOM = settings(max_examples=150, deadline=None, derandomize=True)

messy_text = st.text(st.sampled_from("aAbB09 .,-_\n\té中ßÀ"), max_size=40)


@RANDOM
@given(st.lists(messy_text, min_size=2, max_size=4), st.integers(1, 6))
def test_shingle_sets_are_those_of_words(texts, ngram):
    """The hashed sets have the sizes and the similarities of sets of tuples of lower-cased words."""
    sets = MinHasher(8, ngram, 0).shingle_sets(Texts.of(texts))
    hashed = [set(sets.values[a:b].tolist()) for a, b in zip(sets.borders[:-1], sets.borders[1:], strict=True)]
    plain = [shingles(text, ngram) for text in texts]
    assert [len(one) for one in hashed] == [len(one) for one in plain]
    assert np.diff(sets.borders).tolist() == [len(one) for one in plain]
    assert jaccard(hashed[0], hashed[1]) == jaccard(plain[0], plain[1])
    for a, b in zip(sets.borders[:-1], sets.borders[1:], strict=True):
        assert (np.diff(sets.values[a:b].astype(np.int64)) > 0).all()


@RANDOM
@given(st.lists(messy_text, min_size=1, max_size=4))
def test_a_signature_depends_on_the_set_alone(texts):
    """Signatures are equal exactly where the sets are, wherever in the buffer a text lies."""
    signatures = MinHasher(64, 3, 7).signatures(Texts.of(["the first text", *texts]))[1:]
    for i, text in enumerate(texts):
        alone = MinHasher(64, 3, 7).signatures(Texts.of([text]))
        np.testing.assert_array_equal(alone[0], signatures[i])
        assert (alone == EMPTY).all() == (not shingles(text, 3))
        assert (alone == EMPTY).any() == (not shingles(text, 3))
        for j, other in enumerate(texts):
            assert (signatures[i] == signatures[j]).all() == (shingles(text, 3) == shingles(other, 3))


def word_set_pairs(union_size: int, num_shared: int, num_pairs: int) -> Texts:
    """Texts two by two: sets of words (for ngram 1) that share some, the others divided between them."""
    texts = []
    for pair in range(num_pairs):
        names = [f"w{pair}x{i}" for i in range(union_size)]
        border = num_shared + (union_size - num_shared) // 2
        texts += [" ".join(names[:border]), " ".join([*names[:num_shared], *names[border:]])]
    return Texts.of(texts)


@pytest.mark.parametrize("union_size", [2, 3, 6, 12, 16, 20, 40, 120, 256, 600, 3000])
@pytest.mark.parametrize("share", [0.5, 0.85])
def test_estimates_are_unbiased_and_no_wider_than_binomial(union_size, share):
    """Over many pairs the mean error is nought within its standard error, the spread is at most that of num_hashes
    independent permutations, and no single estimate is far off; documents with fewer shingles than bins included."""
    num_pairs = 500
    num_shared = max(1, round(union_size * share))
    similarity = num_shared / union_size
    signatures = MinHasher(NUM_HASHES, 1, 3).signatures(word_set_pairs(union_size, num_shared, num_pairs))
    estimates = (signatures[0::2] == signatures[1::2]).mean(axis=1)
    variance = similarity * (1 - similarity) / NUM_HASHES
    errors = estimates - similarity
    assert abs(errors.mean()) <= 4 * np.sqrt(variance / num_pairs)
    # the measured variance itself scatters by sqrt(2 / num_pairs)
    assert (errors**2).mean() <= variance * (1 + 4 * np.sqrt(2 / num_pairs))
    assert np.abs(errors).max() <= SIGMAS * np.sqrt(variance) + 1e-12


@pytest.mark.parametrize("num_words", [8, 30, 200, 2000])
def test_estimates_of_edited_texts(num_words):
    """The same for 5-grams of texts with words replaced."""
    rng = np.random.default_rng(num_words)
    texts = []
    for _ in range(100):
        original = words(rng, num_words)
        texts += [" ".join(original), " ".join(edited(rng, original, int(rng.integers(0, 1 + num_words // 20))))]
    signatures = MinHasher(NUM_HASHES, 5, 0).signatures(Texts.of(texts))
    for pair in range(0, len(texts), 2):
        similarity = jaccard(shingles(texts[pair], 5), shingles(texts[pair + 1], 5))
        estimate = (signatures[pair] == signatures[pair + 1]).mean()
        assert abs(estimate - similarity) <= SIGMAS * np.sqrt(similarity * (1 - similarity) / NUM_HASHES)


@pytest.mark.parametrize(("union_size", "num_shared"), [(10, 7), (40, 28), (400, 280), (2000, 1400)])
def test_bands_agree_as_often_as_independent_values(union_size, num_shared):
    """The values are independent enough: whole bands of short and of long documents agree along the S-curve."""
    num_pairs, rows = 1000, 8
    signatures = MinHasher(NUM_HASHES, 1, 5).signatures(word_set_pairs(union_size, num_shared, num_pairs))
    equal = (signatures[0::2] == signatures[1::2]).reshape(num_pairs, -1, rows)
    met = equal.all(axis=2).any(axis=1).mean()
    expected = collision_probability(num_shared / union_size, NUM_HASHES // rows, rows)
    assert abs(met - expected) <= 4 * np.sqrt(expected * (1 - expected) / num_pairs)


@RANDOM
@given(st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.integers(1, 20))
def test_bins_hold_the_smallest_value_of_the_earliest_turn(shingles, num_bins):
    """The kernel equals the definition, worked out for every shingle, turn and bin with Python's integers."""
    bins = np.zeros(num_bins, np.uint64)
    _fill_bins(np.array(sorted(shingles), np.uint64), bins)
    for number in range(num_bins):
        throws = []
        for turn in range(2 * num_bins):
            factor = int(mix(np.uint64(turn))) % 2**64 | 1
            for shingle in shingles:
                thrown = shingle * factor % 2**64
                fell_into = (thrown >> 32) * num_bins >> 32 if turn < num_bins else turn - num_bins
                if fell_into == number:
                    throws.append((turn, thrown % 2**32 & ~1))
        turn, value = min(throws)
        assert int(bins[number]) == turn << 32 | value


def test_seeds_give_other_signatures():
    """Two seeds agree by chance alone."""
    texts = Texts.of([" ".join(f"word{i}" for i in range(2000))])
    first, second = (MinHasher(NUM_HASHES, 5, seed).signatures(texts) for seed in (0, 1))
    assert (first == second).mean() < 0.02


def test_stored_signatures_stay_valid():
    """The values themselves are part of the format of an index: a change must raise index.FORMAT."""
    texts = Texts.of(["Many a text, many a word; and numbers: 1 2 3.", "zwei Wörter", " ".join(map(str, range(1000)))])
    hasher = MinHasher(NUM_HASHES, 5, 0)
    signatures, sets = hasher.signatures(texts), hasher.shingle_sets(texts)
    assert xxhash.xxh3_64_hexdigest(sets.values.tobytes()) == "7b7661f74b98bd7c"
    assert xxhash.xxh3_64_hexdigest(signatures.tobytes()) == "c76a57e78ca6074f"
