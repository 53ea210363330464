"""The one pass over the bytes against strings: equal numbers for every column of every text."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.rules.characters import (
    ALPHANUMERIC,
    BLANK,
    BULLET,
    DIGIT,
    LETTER,
    NUM_CODE_POINTS,
    PUNCTUATION,
    TERMINAL,
    WORD,
    character_classes,
    decode,
    start_of_last,
)
from megalite.corpus.rules.columns import COLUMNS
from megalite.corpus.rules.duplicates import count_duplicates, make_table
from megalite.corpus.rules.repetition import LONGEST, make_grams, measure_repetition
from megalite.corpus.rules.settings import FineWebConfig, GopherQualityConfig
from megalite.corpus.rules.statistics import measure, no_statistics
from megalite.texts import Texts
from tests.corpus.rules import reference
from tests.corpus.rules.samples import TRAPS, library_texts, random_texts


def measured(texts: Texts, **options) -> list[dict[str, int]]:
    """The columns of each text by name."""
    table = no_statistics(len(texts))
    measure(texts, table, **options)
    return [dict(zip(COLUMNS, row, strict=True)) for row in table.tolist()]


def assert_equal(texts: list[str], **options) -> None:
    for text, row in zip(texts, measured(Texts.of(texts), **options), strict=True):
        truth = reference.statistics(text, **options)
        assert {name: row[name] for name in truth} == truth, repr(text[:200])


def test_traps():
    """Hand-made texts: empty, one character, only punctuation, scripts without blanks, odd blanks, CRLF."""
    assert_equal(TRAPS)


@settings(max_examples=300, deadline=None)
@given(st.lists(random_texts, max_size=4))
def test_random_texts(texts):
    """Any Unicode; several texts in one batch, so that nothing leaks from one to the next."""
    assert_equal(texts)


def test_real_texts():
    """Sources of Python's library."""
    assert_equal(library_texts())


@settings(max_examples=50, deadline=None)
@given(random_texts)
def test_settings_of_statistics(text):
    """Other stop words, ends of sentences and short lines."""
    quality = GopherQualityConfig(stop_words=("a", "é", "漢字"))
    assert_equal([text], quality=quality, fineweb=FineWebConfig(terminal_characters="。c", short_line_chars=3))


def test_a_line_of_a_megabyte():
    """One line without an end, of words that repeat, and one without a blank."""
    rng = np.random.default_rng(0)
    words = " ".join(f"w{number}" for number in rng.integers(0, 50_000, 150_000))
    assert_equal([words, "漢" * 350_000, "short"])


def test_63_stop_words():
    """As many as there are flags, each counted once."""
    words = tuple(f"w{number}" for number in range(63))
    [row] = measured(Texts.of([" ".join(words * 2) + " other"]), quality=GopherQualityConfig(stop_words=words))
    assert row["stop_words"] == 63


def test_texts_may_lie_anywhere_in_a_buffer():
    """Offsets that do not begin at 0, as in a slice of a column."""
    texts = Texts.of(["before the slice…", "漢字 and\nthe rest.", "", "the end..."])
    part = Texts(texts.buffer, texts.offsets[1:])
    assert measured(part) == measured(texts)[1:]
    assert measured(Texts(texts.buffer, texts.offsets[4:])) == []


def test_repetition_is_left_out_when_not_asked_for():
    """Only the n-grams' columns differ."""
    texts = Texts.of(["a b a b a b a b c"])
    [full], [part] = measured(texts), measured(texts, repetition=False)
    differ = {name for name in COLUMNS if full[name] != part[name]}
    assert differ == {f"top_{n}gram_chars" for n in (2, 3, 4)} | {f"duplicate_{n}gram_chars" for n in (5, 6)}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=120), st.integers(0, 2**32))
def test_ngrams(names, seed):
    """Few different words, so that every length of n-gram repeats, overlaps and ties."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**64, 4, np.uint64)[names]
    row = np.zeros(len(COLUMNS), np.int64)
    chars = np.array([name + 1 for name in names], np.int32)
    table, grams = make_table(len(names)), make_grams(len(names))
    measure_repetition(keys, chars, len(names), grams, table, row, LONGEST)
    truth = reference.ngram_statistics(["abcd"[name] * (name + 1) for name in names])
    assert {name: row[COLUMNS.index(name)] for name in truth} == truth


def test_the_table_of_duplicates_forgets():
    """Uses of different sizes follow each other; keys that differ only in upper or lower bits are not mixed up."""
    rng = np.random.default_rng(1)
    table = make_table(1000)
    for size in (1000, 3, 0, 500, 1, 1000):
        keys = rng.integers(0, max(size // 2, 1), size).astype(np.uint64)
        keys[::2] <<= np.uint64(32)
        chars = rng.integers(0, 9, size).astype(np.int32)
        first = np.unique(keys, return_index=True)[1]
        repeated = np.setdiff1d(np.arange(size), first)
        assert count_duplicates(keys, chars, size, table) == (repeated.size, chars[repeated].sum())


def test_character_classes():
    """Every code point has the flags that Python's methods and Unicode's categories give."""
    classes = character_classes(".。")
    for point in range(NUM_CODE_POINTS):
        character = chr(point)
        flags = BLANK * character.isspace() | LETTER * character.isalpha() | DIGIT * character.isdecimal()
        flags |= ALPHANUMERIC * character.isalnum() | WORD * (character.isalnum() or character == "_")
        flags |= PUNCTUATION * (unicodedata.category(character)[0] in "PS")
        flags |= TERMINAL * (character in ".。") | BULLET * (character in "•-")
        assert classes[point] == flags, hex(point)


@pytest.mark.parametrize(
    "character", ["\0", "a", "\x7f", "\x80", "߿", "ࠀ", "漢", "\uffff", "\U00010000", "🙂", "\U0010ffff"]
)
def test_decode(character):
    """The first and last code points of each length in bytes."""
    encoded = np.frombuffer(f"é{character}é".encode(), np.uint8)
    assert decode(encoded, 2) == (ord(character), encoded.size - 2)
    assert start_of_last(encoded, encoded.size - 2) == 2
