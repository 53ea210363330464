"""Blanks squeezed in bytes, against str.split."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.blanks import squeeze
from megalite.texts import Texts

BLANKS = "".join(chr(code) for code in range(sys.maxunicode) if chr(code).isspace())


def split(text: str) -> str:
    return " ".join(text.split())


@given(
    st.lists(st.text(st.sampled_from(BLANKS + "aé\u2007\u200b\u3001漢🙂") | st.characters(exclude_categories=["Cs"])))
)
@settings(max_examples=300, deadline=None)
def test_squeeze_is_split_and_join(texts):
    """For every kind of blank, at the ends, in runs, between any characters."""
    assert list(squeeze(Texts.of(texts))) == list(map(split, texts))


def test_every_character():
    """Each one between two letters: a blank where str says so."""
    codes = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    texts = Texts.of(f"a{chr(code)}b" for code in codes)
    different = [code for code, text in zip(codes, squeeze(texts), strict=True) if text != split(f"a{chr(code)}b")]
    assert not different
