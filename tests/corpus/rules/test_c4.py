"""C4's repair of lines, and the search for phrases, against strings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.rules.c4 import edit_lines
from megalite.corpus.rules.characters import character_classes
from megalite.corpus.rules.columns import COLUMNS
from megalite.corpus.rules.phrases import count_phrases, make_phrases
from megalite.corpus.rules.settings import C4Config
from megalite.corpus.rules.statistics import no_statistics
from megalite.texts import Texts
from tests.corpus.rules import reference
from tests.corpus.rules.samples import TRAPS, library_texts, random_texts

LAX = C4Config(terminal_punctuation=False, min_words_per_line=None, max_word_length=None)
SHORT = C4Config(min_words_per_line=2, max_word_length=12, min_sentences=None)
CONFIGS = {
    "default": C4Config(),
    "short": SHORT,
    "no terminals": C4Config(terminal_punctuation=False, min_words_per_line=3),
    "lax": LAX,
    "nothing": LAX.model_copy(
        update={
            "remove_citations": False,
            "drop_javascript_lines": False,
            "reject_lorem_ipsum": False,
            "policy_phrases": (),
        }
    ),
    "other scripts": C4Config(terminal_characters="。！é", min_words_per_line=1, policy_phrases=("漢字", "É b")),
}

LINES = st.lists(
    st.sampled_from(
        [
            *(
                "A good line of five words.",
                " So he said. [3]",
                "[edit]",
                "[1][22] [citation needed]",
                "x[١].",
                "[1a].",
                "[",
            ),
            *(
                "Enable JavaScript now please, all.",
                "our Privacy POLICY is this long one.",
                "Lorem ipsum dolor sit amet.",
            ),
            *(
                "f() { return 1; } and more.",
                "javascript { here, in a line.",
                "ends in dots...",
                'Said: "Stop!" He did.',
            ),
            *(
                "w" * 12 + " b.",
                "w" * 13 + " b.",
                "漢字。漢字！次",
                "漢字です。",
                "",
                " \t",
                "Mr. Bell? (Yes.) No!",
                "a. b.  c..",
                "“Oh.” he",
            ),
        ]
    ),
    max_size=8,
).map("\n".join)


def edited(texts: list[str], config: C4Config) -> list[tuple[str, dict[str, int]]]:
    table = no_statistics(len(texts))
    new = edit_lines(Texts.of(texts), config, table)
    return [(text, dict(zip(COLUMNS, row, strict=True))) for text, row in zip(new, table.tolist(), strict=True)]


def assert_equal(texts: list[str], config: C4Config) -> None:
    for text, (new, row) in zip(texts, edited(texts, config), strict=True):
        true_text, columns = reference.c4(text, config)
        assert (new, {name: row[name] for name in columns}) == (true_text, columns), repr(text[:300])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_traps_and_real_texts(config):
    """Hand-made texts, sources of Python's library, and a line of a megabyte."""
    assert_equal([*TRAPS, *library_texts(), "word " * 200_000 + "end.", "x" * 1_000_000], config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(LINES | random_texts, max_size=4))
def test_random_texts(config, texts):
    """Lines that meet or just miss each rule, in any order, and any Unicode; several texts in a batch."""
    assert_equal(texts, config)


def test_a_page():
    """What C4 is for, in one look."""
    page = (
        "Home | About | Contact\n\n  The quiet goon sat on the wall.[1] \nPlease enable Javascript to see this page.\n"
        "We use cookies to make this page better.\nIt saw the sea, and more sea. [citation needed]\nRead more...\n"
    )
    [(text, row)] = edited([page], C4Config())
    assert text == "The quiet goon sat on the wall.\nIt saw the sea, and more sea."
    assert row["sentences"] == 2


def test_lorem_ipsum_and_brackets_count_only_in_lines_that_stay():
    """A bracket in a menu that is dropped does not reject the page."""
    texts = [
        "menu { lorem ipsum }",
        "A sentence with { in it, to stay.",
        "Turn on javascript { or go away.",
        "lorem ipsum and javascript in one line.",
    ]
    found = [(row["lorem_ipsum_lines"], row["curly_bracket_lines"]) for _, row in edited(texts, C4Config())]
    assert found == [(0, 0), (0, 1), (0, 0), (1, 0)]


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("abAB _-é漢É1"), max_size=60),
    st.lists(st.text(st.sampled_from("abAé漢 1"), min_size=1, max_size=4), min_size=1, max_size=6),
    st.booleans(),
)
def test_phrases(text, phrases, whole_words):
    """Phrases that hold, begin and end each other, anywhere or as whole words, in any case of letters."""
    texts = Texts.of(["a", text, "b"])  # what lies beside the text in the buffer must not matter
    automaton = make_phrases([phrases])
    start, end = texts.offsets[1], texts.offsets[2]
    found = count_phrases(texts.buffer, start, end, automaton, character_classes(), whole_words)
    assert found == reference.bad_words(text, phrases, whole_words=whole_words)


@pytest.mark.parametrize(
    ("text", "phrases", "count"),
    [
        ("1a b", ["a b", "b"], 1),  # the longer one is touched, the shorter one that ends with it is not
        ("a b", ["a bc", "b"], 1),  # a shorter one ends inside the beginning of a longer one
        ("x a b", ["x a bc", "a b", "b"], 1),  # both end here: one place
        ("a b c", ["a b", "c"], 2),
    ],
)
def test_phrases_inside_phrases(text, phrases, count):
    """Whole words where several phrases end at one place."""
    buffer = np.frombuffer(text.encode(), np.uint8)
    assert count_phrases(buffer, 0, buffer.size, make_phrases([phrases]), character_classes(), True) == count
    assert reference.bad_words(text, phrases, whole_words=True) == count


def test_groups_of_phrases():
    """A phrase may be in two groups, and a longer phrase has the flags of those that end with it."""
    automaton = make_phrases([["she", "x"], ["he", "x"], []])
    flags = []
    for text in (b"she", b"he", b"x", b"sh"):
        state = 0
        for byte in text:
            state = int(automaton.steps[state + automaton.columns[byte]])
        flags.append(int(automaton.groups[state // automaton.num_columns]))
        assert (state >= automaton.first_end) == (flags[-1] > 0)
    assert flags == [3, 2, 3, 0]


def test_texts_may_lie_anywhere_in_a_buffer():
    """Offsets that do not begin at 0, as in a slice of a column."""
    texts = Texts.of(["Before the slice of the column.", "A good line of five words.\nmenu", "The rest of it is here."])
    part = Texts(texts.buffer, texts.offsets[1:])
    assert list(edit_lines(part, C4Config(), no_statistics(2))) == ["A good line of five words.", texts[2]]


def test_no_documents():
    """An empty batch is no trap."""
    assert edited([], C4Config()) == []
    assert edit_lines(Texts(np.zeros(0, np.uint8), np.zeros(1, np.int64)), LAX, no_statistics(0)).num_bytes == 0
