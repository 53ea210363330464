"""The quality rules against datatrove's own filters: equal decisions, but for a table of differences with reasons.

datatrove is given our words (`datatrove_filters.py`), since the rules are compared here and not the tokenizers; what
its English tokenizer does otherwise is the first difference that `rules/gopher.py` lists.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from megalite.corpus.repair.repair import repair
from megalite.texts import Texts
from tests.corpus.oracles.documents import bent_documents, real_documents
from tests.corpus.oracles.our_rules import EDIT, PLAIN, our_decisions
from tests.corpus.rules.reference import is_punctuation
from tests.corpus.rules.samples import TRAPS
from tests.kit.child import ask, need

MOST_EXCUSED = 0.002
"""Of all comparisons on real documents after the repair."""

LINE_ENDS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
CITATION = r"\[(?:\d*|edit|citation needed)\]"


class Difference(NamedTuple):
    """A reason why decisions may differ."""

    why: str
    rules: tuple[str, ...]
    """Beginnings of the names of the rules that it touches."""
    applies: Callable[[str], bool]
    """Whether a text has what makes the difference."""
    witness: str
    """A text on which some of the rules do differ."""
    survives_repair: bool = True


def has_words_of_symbols(text: str) -> bool:
    """A chunk that is a word here and none there, or the other way round."""
    listed = set(answers()["punctuation"])
    return any(all(map(is_punctuation, chunk)) != all(one in listed for one in chunk) for chunk in text.split())


def has_runs_that_join_equal(text: str) -> bool:
    """Different runs of 5 to 10 words that are the same string without the blanks."""
    words = text.split()
    for length in range(5, 11):
        runs = {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}
        if len({"".join(run) for run in runs}) < len(runs):
            return True
    return False


DIFFERENCES = (
    Difference(
        "no chunk at all: datatrove rejects or divides by zero; here the rule `empty` rejects",
        ("gopher", "fineweb"),
        lambda text: not text.split(),
        " \u3000",
    ),
    Difference(
        "no word, but punctuation: its mean length is 0 here and not a number there, which is never too short",
        ("gopher: short words",),
        lambda text: all(map(is_punctuation, "".join(text.split()))),
        "--- ---",
    ),
    Difference(
        "words: punctuation is Unicode's P and S here, a list of characters there, so an emoji or an arrow is a word "
        "there and a full-width 1 is none",
        ("gopher: too few words", "gopher: too many words", "gopher: short words", "gopher: long words"),
        has_words_of_symbols,
        "The geese of → " * 16,
    ),
    Difference(
        "line ends of other kinds, which the repair replaces, and an empty last line",
        ("gopher: many bullet lines", "gopher: many lines end", "c4"),
        lambda text: any(end in text for end in LINE_ENDS) or text.endswith("\n"),
        "- one...\r- two...\r- three",
        survives_repair=False,
    ),
    Difference(
        "lines: blank ones count there, and so does nothing before the first or after the last line end",
        ("gopher: duplicate lines", "gopher: characters in duplicate lines"),
        lambda text: re.search(r"(^|\n)[^\S\n]*(\n|$)", text) is not None,
        "a\n\u3000\nb\n\u3000\nc\n\u3000\nd\n\u3000",
    ),
    Difference(
        "paragraphs: parted by empty lines there, by blank lines here",
        ("gopher: duplicate paragraphs", "gopher: characters in duplicate paragraphs"),
        lambda text: re.search(r"\n[^\S\n]+(\n|$)", text) is not None,
        "a b\n\u3000\na b\n\u3000\na b",
    ),
    Difference(
        "paragraphs: blanks before the first and after the last word are gone there",
        ("gopher: duplicate paragraphs", "gopher: characters in duplicate paragraphs"),
        lambda text: text != text.strip(),
        "  indented\n\n  indented\n\nb",
    ),
    Difference(
        'repeated runs of words: "ab c" and "a bc" are the same there',
        ("gopher: duplicate",),
        has_runs_that_join_equal,
        "ab c d e f g a bc d e f g",
    ),
    Difference(
        "blanks at the end of a line hide its punctuation there",
        ("fineweb: few lines end a sentence",),
        lambda text: re.search(r"\S[^\S\n]+(\n|$)", text) is not None,
        "The end. \n" * 3,
        survives_repair=False,
    ),
    Difference(
        "letters: all of Unicode in lower case there, A to Z here; the Kelvin sign is a k",
        ("c4",),
        lambda text: any(not one.isascii() and re.search("[a-z]", one.lower()) for one in text),
        "We use coo\u212aies to make this page better.\n" * 3,
    ),
    Difference(
        "the blank before a citation at the end of a line: it goes here, and hides the full stop there",
        ("c4",),
        lambda text: re.search(rf"\s({CITATION}\s*)+(\n|$)", text) is not None,
        "So he said to all of them. [3]",
    ),
    Difference(
        "the blank behind a citation at the beginning of the text stays here",
        (EDIT,),
        lambda text: re.search(rf"(^|\n)\s*{CITATION}\s", text) is not None,
        "[3] So he said to all of them.",
    ),
)


@lru_cache(maxsize=1)
def asked() -> dict[str, int]:
    """Each text that datatrove is asked about, once, and its number."""
    return {text: number for number, text in enumerate(dict.fromkeys((*raw_documents(), *repaired_documents())))}


@lru_cache(maxsize=1)
def answers() -> dict[str, Any]:
    """Its decision of each rule on each text, and what C4 leaves; one process answers for all tests."""
    need("datatrove")
    return ask("tests.corpus.oracles.datatrove_filters", {"texts": list(asked()), "words": "plain"})


def theirs(texts: Sequence[str]) -> dict[str, list]:
    rows = [asked()[text] for text in texts]
    columns = {**answers()["decisions"], EDIT: answers()["edited"]}
    return {rule: [column[row] for row in rows] for rule, column in columns.items()}


@lru_cache(maxsize=2)
def ours(texts: tuple[str, ...]) -> dict[str, list]:
    return our_decisions(texts, PLAIN)


@lru_cache(maxsize=1)
def raw_documents() -> tuple[str, ...]:
    """Real ones, bent ones and traps."""
    real = real_documents()
    return (*real, *bent_documents(real * 2, random.Random(0)), *TRAPS, *(each.witness for each in DIFFERENCES))


@lru_cache(maxsize=1)
def repaired_documents() -> tuple[str, ...]:
    return tuple(repair(Texts.of(raw_documents())))


@pytest.mark.parametrize("is_repaired", [False, True], ids=["raw", "repaired"])
def test_decisions_are_equal(is_repaired):
    """Every rule alone, on every document: equal, or the table says why. Each rule rejects some and keeps some."""
    texts = repaired_documents() if is_repaired else raw_documents()
    table = [each for each in DIFFERENCES if each.survives_repair or not is_repaired]
    mine, yours = ours(texts), theirs(texts)
    assert set(mine) == set(yours)
    unexplained = []
    for rule in mine:
        if rule != EDIT and rule != "gopher: too many words":
            assert 0 < sum(mine[rule]) < len(texts), rule
        differ = [text for text, one, other in zip(texts, mine[rule], yours[rule], strict=True) if one != other]
        for text in differ:
            if not any(rule.startswith(each.rules) and each.applies(text) for each in table):
                unexplained.append(f"{rule}: {text[:2000]!r}")
    assert not unexplained, f"{len(unexplained)}:\n" + "\n".join(unexplained[:5])


def test_differences_are_rare():
    """The table excuses hardly any decision on real documents as they are after the repair."""
    num_real = len(real_documents())  # the first of all
    mine, yours = ours(repaired_documents()), theirs(repaired_documents())
    pairs = [pair for rule in mine for pair in zip(mine[rule][:num_real], yours[rule][:num_real], strict=True)]
    assert sum(one != other for one, other in pairs) <= MOST_EXCUSED * len(pairs)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.why.partition(":")[0])
def test_no_difference_is_listed_in_vain(difference):
    """Its witness is decided differently by a rule that it names."""
    assert difference.applies(difference.witness)
    place = raw_documents().index(difference.witness)
    mine, yours = ours(raw_documents()), theirs(raw_documents())
    assert any(mine[rule][place] != yours[rule][place] for rule in mine if rule.startswith(difference.rules))
