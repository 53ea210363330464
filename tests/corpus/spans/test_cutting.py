"""Cutting spans out: only what was asked for, valid UTF-8, whole words, none glued together."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.spans.cutting import LONGEST_WORD, covered_bytes, cut, merge_spans, trim_to_words
from megalite.texts import Texts
from tests.corpus.spans.kit import as_tuples, remove_spans, spans_of_cover

WORD = re.compile(r"[a-zA-Z0-9\u0080-\u07ff]+")

texts_strategy = st.lists(st.text("aZ9 \n.é日😀", max_size=24), min_size=1, max_size=4)
rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 30)), max_size=6)


def spans_in(texts: list[str], rows: list[tuple[int, int, int]]) -> np.ndarray:
    """Merged spans that lie inside the texts."""
    spans = []
    for text, start, length in rows:
        size = len(texts[text % len(texts)].encode())
        if start < size:
            spans.append((text % len(texts), start, min(start + length, size)))
    return merge_spans(np.array(spans, np.int64).reshape(-1, 3))


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 9)), max_size=12))
def test_merge_is_the_union(rows):
    """Merged spans cover exactly the bytes that any span covers; touching ones of one text become one."""
    spans = np.array([(text, start, start + length) for text, start, length in rows], np.int64).reshape(-1, 3)
    covers = [np.zeros(40, bool) for _ in range(3)]
    for text, start, end in as_tuples(spans):
        covers[text][start:end] = True
    merged = merge_spans(spans)
    assert as_tuples(merged) == spans_of_cover(covers)
    assert covered_bytes(merged, 3).tolist() == [int(cover.sum()) for cover in covers]


@settings(max_examples=250, deadline=None)
@given(texts=texts_strategy, rows=rows)
def test_cut_keeps_characters_and_words(texts, rows):
    """What is left is valid UTF-8; every word of it stood in the text; only bytes of the spans are gone."""
    spans = spans_in(texts, rows)
    trimmed = trim_to_words(Texts.of(texts), spans)
    for text, start, end in as_tuples(trimmed):
        assert any(text == t and s <= start < end <= e for t, s, e in as_tuples(spans))
    left = cut(Texts.of(texts), trimmed)
    assert [left.bytes_of(number) for number in range(len(texts))] == remove_spans(texts, trimmed)
    for text, rest in zip(texts, left, strict=True):
        words = WORD.findall(text)
        for word in WORD.findall(rest):
            assert word in words


def cut_words(texts: list[str], spans: list[tuple[int, int, int]]) -> list[str]:
    """Trim, then cut."""
    given = Texts.of(texts)
    return list(cut(given, trim_to_words(given, np.array(spans))))


def test_ends_move_inwards_to_whole_words():
    """The words at both ends stay, and one blank between them."""
    text = "The quick brown fox jumps over the lazy dog"
    spans = [(0, text.index("ck brown"), text.index("zy dog"))]
    assert cut_words([text], spans) == ["The quick lazy dog"]


def test_whole_text_and_its_ends():
    """A span over a whole text leaves nothing; one at an end needs no blank."""
    texts = ["all of it", "head stays", "stays tail", "untouched"]
    assert cut_words(texts, [(0, 0, 9), (1, 0, 5), (2, 5, 10)]) == ["", "stays", "stays", "untouched"]


def test_text_without_blanks():
    """Chinese is cut between characters; a 'word' too long to be one is cut where the span ends."""
    chinese, code = "天地玄黄宇宙洪荒", "A" * 40 + "B" * 200 + "C" * 60
    assert LONGEST_WORD < 60
    assert cut_words([chinese, code], [(0, 4, 14), (1, 40, 240)]) == ["天地宇宙洪荒", "A" * 40 + "C" * 60]
