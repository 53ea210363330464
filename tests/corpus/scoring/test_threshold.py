"""Thresholds: exactly the k-th best of all shards, whatever the shards; and the Pareto rule keeps what it should."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.scoring import threshold as module
from megalite.corpus.scoring.classifier import train_classifier
from megalite.corpus.scoring.ngram import train_ngram
from megalite.corpus.scoring.threshold import Scorer, Threshold, best_fraction, pareto_keeps, write_scores
from megalite.errors import DataError
from megalite.texts import Texts
from tests.kit.data import prose

DTYPES = st.sampled_from([np.float32, np.float64])

SCORES = st.lists(
    st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, math.inf]), min_size=1, max_size=60
)

FRACTIONS = st.sampled_from([0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])


def write_shards(folder, scores: np.ndarray, borders: list[int]) -> list:
    paths = [folder / f"part-{number}.npy" for number in range(len(borders) + 1)]
    for path, part in zip(paths, np.split(scores, sorted(borders)), strict=True):
        write_scores(path, part)
    return paths


@given(
    scores=SCORES, borders=st.lists(st.integers(0, 60), max_size=4), dtype=DTYPES, share=FRACTIONS, higher=st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_the_threshold_is_that_of_a_sort(tmp_path_factory, scores, borders, dtype, share, higher):
    """The k-th of all scores in order; as many are better than it as there are before it, and ties stay."""
    scores = np.array(scores, dtype)
    paths = write_shards(tmp_path_factory.mktemp("scores"), scores, [min(border, scores.size) for border in borders])
    found = best_fraction(paths, share, higher_is_better=higher)
    num_kept = math.ceil(Fraction(str(share)) * scores.size)
    in_order = np.sort(scores)[::-1] if higher else np.sort(scores)
    assert found == Threshold(float(in_order[num_kept - 1]), higher)
    kept = found.keeps(scores)
    assert kept.sum() >= num_kept
    assert (kept & (scores != found.value)).sum() < num_kept


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_scores_over_many_chunks(tmp_path, dtype, monkeypatch):
    """Close scores, which only the last pass can tell apart, from shards larger than a chunk."""
    monkeypatch.setattr(module, "CHUNK_SCORES", 1000)
    rng = np.random.default_rng(0)
    scores = (1.0 + np.finfo(dtype).eps * rng.integers(0, 1 << 20, 50_000)).astype(dtype)
    paths = write_shards(tmp_path, scores, [100, 100, 30_000])
    for share in (0.01, 0.25, 0.9):
        expected = np.sort(scores)[::-1][math.ceil(share * scores.size) - 1]
        assert best_fraction(paths, share, higher_is_better=True).value == expected


def test_a_decimal_fraction_is_taken_as_written(tmp_path):
    """0.1 of 30 documents is 3, although the nearest float is a little above a tenth."""
    paths = write_shards(tmp_path, np.arange(30, dtype=np.float32), [7])
    assert best_fraction(paths, 0.1, higher_is_better=True).value == 27.0


def test_a_fixed_threshold_is_compared_in_the_scores_own_precision():
    """A score written as 0.7 is kept by min_score 0.7, though float32's 0.7 is below float64's."""
    scores = np.array([0.69999, 0.7, 0.8], np.float32)
    assert Threshold(0.7, higher_is_better=True).keeps(scores).tolist() == [False, True, True]
    assert Threshold(0.7, higher_is_better=False).keeps(scores).tolist() == [True, True, False]


@pytest.mark.parametrize("kind", ["perplexity", "classifier"])
def test_the_best_of_a_corpus_do_not_depend_on_its_shards(tmp_path, kind):
    """Score, find the threshold, filter: the same documents stay for one shard as for seven, and they are the best."""
    half = [Texts.of(prose(100, seed=seed)) for seed in (1, 2)]
    noise = Texts.of(text[::-1] for text in prose(100, seed=3))
    scorer: Scorer = train_ngram(half) if kind == "perplexity" else train_classifier(half, [noise], hash_bits=12)
    corpus = [*prose(60, seed=4), *(text[::-1] for text in prose(40, seed=5))]
    corpus = [corpus[index] for index in np.random.default_rng(0).permutation(100)]
    kept = []
    for num_shards in (1, 7):
        shards = [Texts.of(corpus[begin::num_shards]) for begin in range(num_shards)]
        paths = [tmp_path / f"{num_shards}-{number}.npy" for number in range(num_shards)]
        for path, texts in zip(paths, shards, strict=True):
            write_scores(path, scorer.score(texts))
        found = best_fraction(paths, 0.6, higher_is_better=scorer.higher_is_better)
        masks = [found.keeps(np.load(path)) for path in paths]
        kept.append({text for texts, mask in zip(shards, masks, strict=True) for text in texts.take(mask)})
    assert kept[0] == kept[1]
    assert kept[0] == set(prose(60, seed=4))


def test_mistakes_are_named(tmp_path):
    """Scores that are no numbers, of two kinds, or none."""
    with pytest.raises(DataError, match="1 of 2 scores are not a number"):
        write_scores(tmp_path / "bad.npy", np.array([1.0, np.nan]))
    write_scores(tmp_path / "a.npy", np.ones(2, np.float32))
    write_scores(tmp_path / "b.npy", np.ones(2, np.float64))
    write_scores(tmp_path / "c.npy", np.ones(0, np.float32))
    with pytest.raises(DataError, match=r"float32.*float64"):
        best_fraction([tmp_path / "a.npy", tmp_path / "b.npy"], 0.5, higher_is_better=True)
    with pytest.raises(DataError, match="no documents"):
        best_fraction([tmp_path / "c.npy"], 0.5, higher_is_better=True)


def test_pareto_keeps_as_often_as_the_distribution_says():
    """Against numpy's own Pareto numbers, at low, middle and perfect scores."""
    texts = Texts.of(f"document {number}" for number in range(40_000))
    for score in (0.0, 0.5, 0.9, 1.0):
        scores = np.full(len(texts), score, np.float32)
        drawn = np.random.default_rng(0).pareto(3.0, 200_000) > 1 - score
        assert pareto_keeps(scores, texts, alpha=3.0, seed=0).mean() == pytest.approx(drawn.mean(), abs=0.01)


def test_pareto_depends_on_text_and_seed_only():
    """Any batch and order gives a text the same fate; another seed gives others theirs."""
    names = [f"document {number}" for number in range(1000)]
    scores = np.linspace(0, 1, 1000).astype(np.float32)
    kept = pareto_keeps(scores, Texts.of(names), alpha=9.0, seed=1)
    assert pareto_keeps(scores[::-1], Texts.of(names[::-1]), alpha=9.0, seed=1)[::-1].tolist() == kept.tolist()
    assert pareto_keeps(scores, Texts.of(names), alpha=9.0, seed=2).tolist() != kept.tolist()
