"""Our walk over spaCy's tables against spaCy itself, in a process that has it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.corpus.rules.english import English

NUM_MIXED = 5000

LONGEST = 200
"""Characters of a chunk that spaCy is asked about: it takes the cube of the length."""

PIECES = (
    *(".", "..", "...", "-", "--", "(", ")", "[", "]", "'", "'s", "n't", '"', ":", ";", ",", "/", "?", "!", "_", "#"),
    *("a", "B", "x1", "10", "km", "US$", "$", "%", "°C", "°", "+", "=", "*", "^", "<", ">", "~", "&", "@", "1.5"),
    *("http://", "a.com", "A.B", "e.g.", "I'm", "can't", ":)", "é", "漢", "字", "—", "…", "“", "’s", "😀", "→", "№"),
)
"""What chunks are put together from, beside spaCy's special cases."""

BAD = ("=", "....", "a))", "a:a", "a.b:c@", "a@", "a.", ":)", "😀", "'", "1km", "$1", "a-")
"""Affixes, infixes and addresses without end."""


def wrong_cuts(texts: Iterable[str]) -> tuple[int, list[tuple[str, list[str], list[str]]]]:
    """How many chunks were asked about, and those that are cut otherwise: chunk, our words, spaCy's."""
    from spacy.lang.en import English as Language

    from megalite.corpus.rules.english import English

    ours, theirs = English(), Language().tokenizer
    chunks = dict.fromkeys(chunk for text in texts for chunk in text.split() if len(chunk) <= LONGEST)
    chunks |= dict.fromkeys(_mixed([*PIECES, *ours.cases]))
    wrong = []
    for chunk in chunks:
        mine, yours = ours.cut(chunk), [word.text for word in theirs(chunk)]
        if mine != yours:
            wrong.append((chunk, mine, yours))
    return len(chunks), wrong


def seconds_of_cuts() -> list[tuple[str, float, float]]:
    """What bad chunks of 3,000 and 12,000 characters take: the piece that they are made of, and the best of three."""
    from megalite.corpus.rules.english import English

    ours, found = English(), []
    for piece in BAD:
        sizes = [piece * (size // len(piece)) for size in (3_000, 12_000)]
        tries = [[_seconds(ours, chunk) for chunk in sizes] for _ in range(3)]
        found.append((piece, min(few for few, _ in tries), min(many for _, many in tries)))
    return found


def _seconds(ours: English, chunk: str) -> float:
    start = time.process_time()
    ours.cut(chunk)
    return time.process_time() - start


def _mixed(pieces: Sequence[str]) -> Iterable[str]:
    rng = random.Random(0)
    for _ in range(NUM_MIXED):
        chunk = "".join(rng.choices(pieces, k=rng.randrange(2, 7)))
        if not any(map(str.isspace, chunk)):
            yield chunk
