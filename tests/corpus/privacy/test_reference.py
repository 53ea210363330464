"""What is written for speed finds what plain patterns find: on real texts, and on pieces of them in any order."""

from __future__ import annotations

import pydoc_data.topics
import random
import re

import pytest

from megalite.corpus.privacy.redact import redact
from megalite.corpus.privacy.settings import PrivacyConfig
from megalite.corpus.privacy.telephone import find_international
from megalite.corpus.privacy.window import Window
from megalite.texts import Texts
from tests.corpus.privacy import reference
from tests.corpus.privacy.test_redact import AWS_SECRET, DASHES, JWT, KINDS, PEM, TAKEN
from tests.corpus.rules.samples import library_texts

MARK = "<MARK>"

PIECES = {
    "api_key": ("sk-", "xoxb-", "ghp_", "hf_", "a1B2c3D4e5F6", "x" * 9, "-", "_", " ", ".", "é", "AIza", "pypi-"),
    "jwt": ("eyJ", ".eyJ", JWT, JWT.split(".")[0], "a1B2c3D4e5F6", "-", ".", " ", "_", "é", "=", "x"),
    "private_key": (
        *PEM.split("\n"),
        f"{DASHES}BEGIN PRIVATE KEY{DASHES}",
        f"{DASHES}END PRIVATE KEY{DASHES}",
        "-",
        "x" * 3000,
    ),
}
"""Of each kind the pieces that its texts are made of, and what may stand between them."""

NUMBERS = ("+49", "+1", "+7", " ", "-", ".", "(0", ")", "12", "345", "6789", "1", " 1234567", "x", "\n", "é")

MAX_ROW = 15
"""Digits of a telephone number; of a longer row the plain pattern takes the first ones now and then."""


def real_texts() -> list[str]:
    """Sources of the library, Python's reference, and the cases of the tables end to end."""
    cases = [around.format(taken) for _, around, taken in TAKEN if taken != AWS_SECRET]
    return [*library_texts(), *pydoc_data.topics.topics.values(), "\n\n".join(cases)]


def mixed(pieces: tuple[str, ...], count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 14))) for _ in range(count)]


@pytest.mark.parametrize("kind", reference.KINDS)
def test_secrets(kind):
    """Keys, tokens and private keys, each kind by itself."""
    texts = [*real_texts(), *mixed(PIECES[kind], 4000)]
    found, _ = redact(Texts.of(texts), PrivacyConfig(**{**dict.fromkeys(KINDS), kind: MARK}))
    expected = [reference.redact(text, kind, MARK) for text in texts]
    assert sum(MARK in text for text in expected) > 20
    assert list(found) == expected


def test_international_numbers():
    """At every plus sign but at the beginning of a line, where it may be a patch's: the same end, or none."""
    count = 0
    for text in [*real_texts(), *mixed(NUMBERS, 20_000)]:
        raw = text.encode()
        for plus in reference.PLUS.finditer(raw):
            row = re.match(rb"[\d ().-]*", raw[plus.end() :])[0]
            if plus.start() == 0 or raw[plus.start() - 1] == 10 or len(re.findall(rb"\d", row)) > MAX_ROW:
                continue
            found = find_international(Window(memoryview(raw), plus.start(), 0, len(raw)))
            expected = reference.find_international(raw, plus.start())
            assert (found and found[1]) == expected, text[plus.start() : plus.start() + 60]
            count += expected is not None
    assert count > 200
