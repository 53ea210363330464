"""Words: the kernel cuts text as a regular expression does."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.scoring import words
from megalite.corpus.scoring.words import LINE_END, LINE_START, UNKNOWN, hash_batches, hash_words
from megalite.texts import Texts
from tests.corpus.scoring.plain_kneser_ney import plain_lines

TEXTS = st.lists(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=40) | st.text(alphabet="aB9 \n\t.é中ก‐🙂", max_size=40)
)


def hashed(*texts: str) -> np.ndarray:
    batch = Texts.of(texts)
    return hash_words(batch.buffer, batch.offsets)[0]


@given(texts=TEXTS)
@settings(max_examples=300, deadline=None)
def test_words_are_those_of_the_regular_expression(texts):
    """Line for line the same words; equal ones have equal hashes and different ones different hashes."""
    stream = hashed(*texts).tolist()
    lines = [line for text in texts for line in plain_lines(text)]
    expected = [word for line in lines for word in ("<s>", *line, "</s>")]
    hash_of = {"<s>": int(LINE_START), "</s>": int(LINE_END)}
    assert len(stream) == len(expected)
    for word, hash_ in zip(expected, stream, strict=True):
        assert hash_of.setdefault(word, hash_) == hash_
    assert len(set(hash_of.values())) == len(hash_of)


def test_case_and_digits_are_folded():
    """As documented: A-Z and digits fold, other capitals do not, marks stand alone."""
    assert hashed("The YEAR 1984!").tolist() == hashed("the year 2026 !").tolist()
    assert hashed("É").tolist() != hashed("é").tolist()
    assert hashed("日本").size == hashed("日 本").size == 4


def test_words_are_no_reserved_values():
    """A million short words: no two collide, and none looks like a line's end."""
    words = [
        f"{chr(97 + a)}{chr(97 + b)}{chr(97 + c)}{chr(97 + d)}"
        for a in range(26)
        for b in range(26)
        for c in range(26)
        for d in range(26)
    ]
    stream = hashed(" ".join(words))[1:-1]
    assert np.unique(stream).size == len(words)
    assert stream.min() > UNKNOWN


@given(texts=TEXTS, batch_bytes=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_batches_cover_the_texts(texts, batch_bytes):
    """The same words text by text, however they are batched; no batch is larger than asked, but for one long text."""
    batch = Texts.of(["in front", *texts])
    batch = Texts(batch.buffer, batch.offsets[1:])
    with mock.patch.object(words, "BATCH_BYTES", batch_bytes):
        found = list(hash_batches(batch))
    each = [part.tolist() for stream, borders in found for part in np.split(stream, borders[1:-1])]
    assert each == [hashed(text).tolist() for text in texts]
    sizes = [len(borders) - 1 for _, borders in found]
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        assert size == 1 or batch.offsets[end] - batch.offsets[end - size] <= batch_bytes
