"""`compat: datatrove` against datatrove's own filters with spaCy's words: equal decisions, but for the classes named.

Agreement of whole families on real documents has a floor, with compat and without; what they disagree about without it
is named by `tools/benchmarks/rules_agreement.py`, and docs/benchmarks/rules.md has the tables of a machine's documents.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest

from megalite.corpus.repair.repair import repair
from megalite.texts import Texts
from tests.corpus.oracles.documents import bent_documents, real_documents
from tests.corpus.oracles.our_rules import EDIT
from tests.corpus.rules.samples import TRAPS
from tests.kit.child import ask, need

MOST_CHARS = 2000
"""Of a document: datatrove reads 0.1 to 0.5 MB/s."""

EACH = 4
"""Of so many real documents one is asked about; tools/benchmarks/rules_agreement.py asks about all."""

NUM_BENT = 60

BULLETS = "\n".join(f"- the item {number} of a list" for number in range(20))

FLOOR = 0.999
"""Share of real documents about which a family with compat decides as datatrove does; it is 1 so far."""

PLAIN_FLOORS = {"gopher_quality": 0.15, "gopher_repetition": 0.6, "fineweb": 0.75, "c4": 0.95}
"""The same without compat. Real documents here are technical ones: of a web page's words fewer are marks.
Which packages are installed moves them."""


@lru_cache(maxsize=1)
def real() -> tuple[str, ...]:
    return tuple(repair(Texts.of(text[:MOST_CHARS] for text in real_documents()[::EACH])))


@lru_cache(maxsize=1)
def documents() -> tuple[str, ...]:
    """Real ones, bent ones and traps, as they are after the repair."""
    bent = bent_documents(list(real()), random.Random(0))
    return (*real(), *repair(Texts.of([*bent[:NUM_BENT], *TRAPS, BULLETS])))


@lru_cache(maxsize=1)
def answers() -> dict[str, Any]:
    need("datatrove")
    need("spacy")
    return ask("tests.corpus.oracles.datatrove_filters", {"texts": documents(), "words": "spacy", "real": real()})


def is_named(rule: str, text: str) -> bool:
    """Whether a difference is one of the classes that are known and wanted."""
    if not text.split():
        return True  # no word at all: datatrove rejects, or divides by zero; here the rule `empty` rejects
    if rule == "gopher: short words":
        return not any(map(str.isalnum, text))  # nothing but marks: their mean length is no number there
    return rule.startswith("c4") and "\u212a" in text  # the Kelvin sign is a k in lower case


def test_every_rule_decides_alike():
    """Each rule alone on each document, and what C4's leave of the text. Each rejects some and keeps some."""
    found = answers()
    mine, yours = found["ours"], {**found["decisions"], EDIT: found["edited"]}
    assert set(mine) == set(yours)
    unexplained = []
    for rule in mine:
        if rule not in (EDIT, "gopher: too many words"):
            assert 0 < sum(mine[rule]) < len(documents()), rule
        for text, one, other in zip(documents(), mine[rule], yours[rule], strict=True):
            if one != other and not is_named(rule, text):
                unexplained.append(f"{rule}: {'rejects' if one else 'keeps'}, there {other}: {text[:500]!r}")
    assert not unexplained, f"{len(unexplained)}:\n" + "\n".join(unexplained[:5])


def test_long_chunks_are_cut_in_time():
    """spaCy takes the cube of a chunk's length; here four times the length takes about four times the time."""
    for piece, few, many in answers()["seconds"]:
        assert many <= 8 * few + 0.02, piece


def test_words_are_spacys():
    """Every chunk of the documents, and some thousands put together from special cases and marks."""
    count, wrong = answers()["cuts"]
    assert count > 8_000
    assert wrong == []


def test_marks_are_datatroves():
    """The characters that it takes for punctuation, and for the end of a sentence."""
    assert answers()["marks"] == answers()["sets"]


@pytest.mark.parametrize("family", PLAIN_FLOORS)
def test_agreement_has_a_floor(family):
    """Share of real documents about which the whole family decides alike, with datatrove's thresholds."""
    verdicts = answers()["families"][family]
    with_compat = sum(bool(theirs) == bool(compat) for theirs, _, compat, _ in verdicts) / len(verdicts)
    without = sum(bool(theirs) == bool(ours) for theirs, ours, _, _ in verdicts) / len(verdicts)
    assert with_compat >= FLOOR
    assert without >= PLAIN_FLOORS[family]
    assert "not explained" not in {why for *_, why in verdicts}
