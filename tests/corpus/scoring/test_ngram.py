"""The n-gram model: perplexity as the plain model computes it, and files that come back as they were."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.scoring.ngram import SETTINGS_FILE, TABLE_FILE, NgramModel, train_ngram
from megalite.errors import DataError
from megalite.texts import Texts
from tests.corpus.scoring.plain_kneser_ney import PlainKneserNey, plain_lines
from tests.corpus.scoring.test_kneser_ney import PRUNES, SAMPLES, zipf_lines
from tests.kit.data import all_bytes, prose

STORED = 1e-6
"""Logs are stored as float32: 24 bits, and a mean over words does not add them up."""


def assert_perplexity(sample: list[str], texts: list[str], **options) -> None:
    model = train_ngram([Texts.of(sample)], **options)
    lines = [line for text in sample for line in plain_lines(text)]
    plain = PlainKneserNey(lines, options["order"], options["min_word_count"], options["prune"])
    assert model.perplexity(Texts.of(texts)) == pytest.approx([plain.perplexity(text) for text in texts], rel=STORED)


@given(
    sample=SAMPLES,
    texts=st.lists(st.text(alphabet="abcdefgz. \n", max_size=60), max_size=6),
    order=st.integers(2, 5),
    min_word_count=st.integers(1, 3),
    prune=PRUNES,
)
@settings(max_examples=150, deadline=None)
def test_perplexity_equals_the_plain_model(sample, texts, order, min_word_count, prune):
    """Texts with known and unknown words, seen and unseen sequences, empty lines and nothing at all."""
    assert_perplexity(sample, texts, order=order, min_word_count=min_word_count, prune=prune)


def test_perplexity_of_longer_texts():
    """A sample with thousands of n-grams, so that the table has collisions and long matches."""
    lines = zipf_lines(1200, seed=3)
    texts = ["\n".join(zipf_lines(20, seed=seed)) for seed in range(8)] + ["\n".join(lines[:30])]
    assert_perplexity(["\n".join(lines)], texts, order=5, min_word_count=2, prune=(0, 1))


def test_texts_do_not_touch_each_other():
    """A text's perplexity is its own, wherever it stands in whichever batch."""
    model = train_ngram([Texts.of(prose(50))], order=4, min_word_count=1, prune=(0,))
    texts = [*prose(20, seed=5), "", "no newline at the end", "\n\n"]
    alone = [float(model.perplexity(Texts.of([text]))[0]) for text in texts]
    batch = Texts.of(["before", *texts])
    assert model.perplexity(Texts(batch.buffer, batch.offsets[1:])).tolist() == alone
    assert alone[-1] == alone[20] == math.inf


def test_batches_of_samples_do_not_matter():
    """The same model from one batch as from many."""
    sample = prose(60)
    whole = train_ngram([Texts.of(sample)])
    pieces = train_ngram(Texts.of([text]) for text in sample)
    assert np.array_equal(whole.table, pieces.table)


def test_text_like_the_sample_is_less_surprising():
    """The point of it all: lines of the sample's kind, then the same words shuffled, then noise."""
    lines = zipf_lines(1200, seed=2)
    model = train_ngram([Texts.of(lines[:1100])])
    rng = np.random.default_rng(0)
    like = "\n".join(lines[1100:])
    shuffled = " ".join(rng.permutation(like.split()).tolist())
    noise = "".join(rng.choice(list("qxzj #;"), len(like)).tolist())
    like, shuffled, noise = model.perplexity(Texts.of([like, shuffled, noise])).tolist()
    assert 2 * like < shuffled
    assert 2 * shuffled < noise


def test_saved_and_loaded(tmp_path):
    """The same scores from the file, the same bytes from the same model."""
    model = train_ngram([Texts.of(prose(60))], order=3)
    model.save(tmp_path / "one")
    train_ngram([Texts.of(prose(60))], order=3).save(tmp_path / "two")
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")
    loaded = NgramModel.load(tmp_path / "one")
    texts = Texts.of(prose(10, seed=4))
    assert loaded.perplexity(texts).tolist() == model.perplexity(texts).tolist()
    assert loaded.settings == model.settings


def test_mistakes_are_named(tmp_path):
    """No text to train on, no model to load, a model of another time."""
    with pytest.raises(DataError, match="no word"):
        train_ngram([Texts.of(["", "\n \n"])])
    with pytest.raises(DataError, match="no n-gram model here"):
        NgramModel.load(tmp_path)
    train_ngram([Texts.of(["a b"])]).save(tmp_path)
    settings_ = json.loads((tmp_path / SETTINGS_FILE).read_text())
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings_ | {"format": 99}))
    with pytest.raises(DataError, match="format 99, expected 1"):
        NgramModel.load(tmp_path)


def test_damaged_models_are_refused(tmp_path):
    """A table that is empty, cut or of another shape; settings that are no JSON, or lack a key."""
    train_ngram([Texts.of(["a b"])]).save(tmp_path)
    table, settings_ = tmp_path / TABLE_FILE, tmp_path / SETTINGS_FILE
    whole, text = table.read_bytes(), settings_.read_text()
    for content in (b"", whole[:-5], whole[:40]):
        table.write_bytes(content)
        with pytest.raises(DataError, match=r"table\.npy: damaged.*train it again"):
            NgramModel.load(tmp_path)
    np.save(table, np.zeros((3, 2), np.uint64))
    with pytest.raises(DataError, match=r"table\.npy: damaged: shape \(3, 2\)"):
        NgramModel.load(tmp_path)
    table.write_bytes(whole)
    lacking = {name: value for name, value in json.loads(text).items() if name != "order"}
    for content in (text[:50], json.dumps(lacking)):
        settings_.write_text(content)
        with pytest.raises(DataError, match=r"ngram\.json: damaged"):
            NgramModel.load(tmp_path)
