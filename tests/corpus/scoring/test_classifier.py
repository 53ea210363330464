"""The quality classifier: the features and the optimum are what they should be, and it tells samples apart."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.scoring.classifier import Classifier, SparseRows, fit_weights, train_classifier
from megalite.corpus.scoring.classifier_kernel import extract, logits, row_logits, spread
from megalite.corpus.scoring.words import hash_words
from megalite.errors import DataError
from megalite.texts import Texts
from tests.kit.data import WORDS, prose

NUM_BUCKETS = 1 << 12

TEXTS = st.lists(st.text(alphabet="abcdeé中. \n", max_size=80), max_size=8)


def hashed(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    batch = Texts.of(texts)
    return hash_words(batch.buffer, batch.offsets)


def plain_features(text: str) -> Counter[int]:
    """Buckets of the words and pairs of a text, one Python number at a time."""
    found: Counter[int] = Counter()
    previous = 0
    for hash_ in hashed([text])[0].tolist():
        if hash_ >> 63:
            found[hash_ % NUM_BUCKETS] += 1
            if previous >> 63:
                found[((previous >> 32) * 0x9E3779B97F4A7C15 + hash_) % NUM_BUCKETS] += 1
        previous = hash_
    return found


def mixed_words(num_documents: int, *, share: float, seed: int) -> list[str]:
    """Documents in which a share of the words comes from one half of a vocabulary, the rest from the other."""
    rng = np.random.default_rng(seed)
    half = len(WORDS) // 2
    documents = []
    for _ in range(num_documents):
        from_first = rng.random(rng.integers(20, 60)) < share
        chosen = np.where(
            from_first, rng.integers(0, half, from_first.size), rng.integers(half, 2 * half, from_first.size)
        )
        documents.append(" ".join(WORDS[index] for index in chosen))
    return documents


def trained(num_documents: int = 400, **options) -> Classifier:
    good = mixed_words(num_documents, share=0.6, seed=1)
    bad = mixed_words(num_documents, share=0.4, seed=2)
    return train_classifier([Texts.of(good)], [Texts.of(bad)], **{"hash_bits": 12, "l2": 1e-4, **options})


@given(texts=TEXTS)
@settings(max_examples=200, deadline=None)
def test_features_are_words_and_pairs(texts):
    """Buckets and shares as counted one by one."""
    borders, buckets, shares = extract(*hashed(texts), NUM_BUCKETS)
    for index, text in enumerate(texts):
        own = slice(borders[index], borders[index + 1])
        expected = plain_features(text)
        assert buckets[own].tolist() == sorted(expected)
        assert shares[own] == pytest.approx([expected[bucket] / expected.total() for bucket in sorted(expected)])


@given(texts=TEXTS, seed=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_scoring_and_training_see_the_same_logits(texts, seed):
    """The kernel over words equals the one over the rows of a training set; empty texts are left out there."""
    weights = np.random.default_rng(seed).normal(size=NUM_BUCKETS).astype(np.float32)
    rows = extract(*hashed(texts), NUM_BUCKETS)
    empty = np.diff(rows[0]) == 0
    scored = logits(*hashed(texts), weights, 0.25)
    assert np.isneginf(scored[empty]).all()
    assert scored[~empty] == pytest.approx(row_logits(*rows, weights)[~empty] + 0.25, abs=1e-5)


def test_spread_is_the_transpose():
    """<A w, s> = <w, A' s>"""
    rng = np.random.default_rng(0)
    rows = extract(*hashed(prose(40)), NUM_BUCKETS)
    weights, slopes = rng.normal(size=NUM_BUCKETS), rng.normal(size=40)
    assert row_logits(*rows, weights) @ slopes == pytest.approx(weights @ spread(*rows, slopes, NUM_BUCKETS))


def test_the_fit_is_the_optimum():
    """The same weights as Newton's method on the dense matrix of a small set, classes of different sizes."""
    texts = mixed_words(20, share=0.7, seed=1) + mixed_words(50, share=0.3, seed=2)
    labels = np.repeat([1.0, 0.0], [20, 50])
    num_buckets, l2 = 64, 1e-3
    rows = SparseRows(*extract(*hashed(texts), num_buckets))
    matrix = np.zeros((70, num_buckets + 1))  # the last column is the bias
    for index, (begin, end) in enumerate(itertools.pairwise(rows.borders)):
        matrix[index, rows.buckets[begin:end]] = rows.shares[begin:end]
    matrix[:, -1] = 1.0
    weight = np.repeat([0.5 / 20, 0.5 / 50], [20, 50])
    pull = np.append(np.full(num_buckets, l2), 0.0)
    found = np.zeros(num_buckets + 1)
    for _ in range(30):
        probability = 1 / (1 + np.exp(-matrix @ found))
        gradient = matrix.T @ (weight * (probability - labels)) + pull * found
        hessian = (matrix.T * (weight * probability * (1 - probability))) @ matrix + np.diag(pull)
        found -= np.linalg.solve(hessian, gradient)
    assert np.abs(gradient).max() < 1e-12
    assert np.allclose(fit_weights(rows, labels, num_buckets, l2), found[:-1], atol=1e-3 * np.abs(found).max())


def test_held_out_documents_are_told_apart():
    """Well above chance on what it has not seen, and the probability is about right: its log loss is near the best
    that the labels allow."""
    classifier = trained(2000)
    report = classifier.settings.report
    assert (report.test_good, report.test_bad) == (200, 200)
    good, bad = (mixed_words(1000, share=share, seed=seed) for share, seed in ((0.6, 11), (0.4, 12)))
    scores = classifier.score(Texts.of(good + bad))
    accuracy = ((scores[:1000] > 0.5).mean() + (scores[1000:] <= 0.5).mean()) / 2
    assert accuracy > 0.85
    assert report.accuracy == pytest.approx(accuracy, abs=0.06)
    assert report.auc > 0.92
    best = np.mean([optimal_loss(text, good=True) for text in good] + [optimal_loss(text, good=False) for text in bad])
    loss = -np.log(np.concatenate([scores[:1000], 1 - scores[1000:]])).mean()
    assert best < loss < best + 0.05


def optimal_loss(text: str, *, good: bool) -> float:
    """Log loss of the true probability of the class, known here because we made the documents."""
    words = text.split()
    first = sum(word in WORDS[: len(WORDS) // 2] for word in words)
    logit = (2 * first - len(words)) * np.log(0.6 / 0.4)
    return float(np.logaddexp(0.0, -logit if good else logit))


def test_length_does_not_raise_a_score():
    """A text twice, on two lines, scores as it does once; one without words scores 0."""
    classifier = trained()
    text = mixed_words(1, share=0.9, seed=3)[0]
    once, twice, empty = classifier.score(Texts.of([text, text + "\n" + text, " \n"])).tolist()
    assert once == pytest.approx(twice, rel=1e-5)
    assert empty == 0.0


def test_order_and_batches_of_samples_do_not_matter(tmp_path):
    """Same documents, other order and batches: the same optimum, up to rounding; same run: the same bytes."""
    good, bad = mixed_words(200, share=0.6, seed=1), mixed_words(150, share=0.4, seed=2)
    one = train_classifier([Texts.of(good)], [Texts.of(bad)], hash_bits=12)
    other = train_classifier((Texts.of([text]) for text in reversed(good)), [Texts.of(bad[::-1])], hash_bits=12)
    texts = Texts.of(mixed_words(50, share=0.5, seed=5))
    assert one.score(texts) == pytest.approx(other.score(texts), abs=1e-3)
    again = train_classifier([Texts.of(good)], [Texts.of(bad)], hash_bits=12)
    one.save(tmp_path / "one.npz")
    again.save(tmp_path / "again.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


def test_saved_and_loaded(tmp_path):
    """The same scores and the same report from the file."""
    classifier = trained()
    classifier.save(tmp_path / "quality.npz")
    loaded = Classifier.load(tmp_path / "quality.npz")
    texts = Texts.of(prose(30))
    assert loaded.score(texts).tolist() == classifier.score(texts).tolist()
    assert loaded.settings == classifier.settings


def test_mistakes_are_named(tmp_path):
    """Too small a sample, samples of one kind, a file that is something else."""
    many = mixed_words(400, share=0.5, seed=1)
    with pytest.raises(DataError, match=r"bad sample has 49 documents .* at least 50"):
        train_classifier([Texts.of(many)], [Texts.of([*many[:49], "", " "])], hash_bits=12)
    with pytest.raises(DataError, match="cannot be told apart"):
        train_classifier([Texts.of(many)], [Texts.of(many)], hash_bits=12)
    with pytest.raises(DataError, match="no such file"):
        Classifier.load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("something else")
    with pytest.raises(DataError, match="not a classifier"):
        Classifier.load(tmp_path / "text.npz")


def test_damaged_files_are_refused(tmp_path):
    """Empty, cut, a flipped byte, settings without a key, weights of another size, and an array alone."""
    path = tmp_path / "quality.npz"
    trained().save(path)
    content = path.read_bytes()
    with np.load(path) as arrays:
        weights, settings_ = arrays["weights"], json.loads(str(arrays["settings"]))
    flipped = bytearray(content)
    flipped[1000] ^= 1
    for damaged in (b"", content[:-50], content[:100], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"quality\.npz: damaged, or not a classifier .*train it again"):
            Classifier.load(path)
    for wrong in ({name: value for name, value in settings_.items() if name != "bias"}, ["list"]):
        with open(path, "wb") as file:
            np.savez(file, weights=weights, settings=np.array(json.dumps(wrong)))
        with pytest.raises(DataError, match="damaged, or not a classifier"):
            Classifier.load(path)
    with open(path, "wb") as file:
        np.savez(file, weights=weights[1:], settings=np.array(json.dumps(settings_)))
    with pytest.raises(DataError, match="damaged: weights of shape"):
        Classifier.load(path)
    with open(path, "wb") as file:
        np.save(file, weights)
    with pytest.raises(DataError, match="damaged, or not a classifier"):
        Classifier.load(path)
