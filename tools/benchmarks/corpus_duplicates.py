"""Duplicates planted in a corpus, and the truth about them.

    exact     a document again
    scatter   a document with a share of its words replaced, dropped or doubled up, spread evenly
    block     a document with a share of its words replaced, all side by side
    crop      a document without its last words
    substr    a passage of one document put into sixteen others, so that only the passage is shared

A line of truth.jsonl is one of
    {"kind": "exact", "a": id, "b": id, "j5": 1.0}           near_exact when a has since received a passage
    {"kind": "scatter" | "block" | "crop", "rate": share of the words, "a": id, "b": id, "j5": likeness}
    {"kind": "substr", "passage": number, "id": id, "start": byte, "end": byte}    where it lies in the document

where b is the planted document, and likeness the true Jaccard index of the sets of five lower-case words in a row.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Truth = dict[str, Any]
"""A line of truth.jsonl."""

Edit = Callable[[str, float, random.Random, Sequence[str]], str]
"""A text, the share of its words to change, randomness and words to change to; the changed text."""

SHINGLE_WORDS = 5

MIN_PER_KIND = 20
MIN_PASSAGES = 8
HOSTS_PER_PASSAGE = 16
PASSAGE_CHARS = (200, 400, 800, 1600, 3200)

WORDS_AND_BLANKS = re.compile(r"(\s+)")


@dataclass
class Record:
    """A document of the corpus, a line of corpus.jsonl."""

    text: str
    id: str
    source: str


def plant(records: Sequence[Record], seed: int, per_kind: float) -> tuple[list[Record], list[Truth]]:
    """Plant duplicates.

    Args:
        records: the corpus; those that receive a passage change.
        seed: decides everything.
        per_kind: how many of each kind, as a share of the corpus.

    Returns:
        All documents, shuffled, and the truth.
    """
    planter = _Planter(records, random.Random(seed * 7919 + 1), max(MIN_PER_KIND, int(len(records) * per_kind)))
    planter.plant_copies("exact", 0)
    for rate in (0.01, 0.02, 0.05, 0.10, 0.20, 0.40):
        planter.plant_copies("scatter", rate, scatter)
    for rate in (0.05, 0.10, 0.20, 0.40):
        planter.plant_copies("block", rate, block)
    for rate in (0.10, 0.30, 0.50):
        planter.plant_copies("crop", rate, crop)
    planter.plant_passages()
    return planter.finish()


def scatter(text: str, rate: float, rng: random.Random, vocabulary: Sequence[str]) -> str:
    """Of the words changed, 70 % are replaced, 15 % dropped, and 15 % gain a word behind them."""
    parts, words = _split(text)
    for index in rng.sample(words, max(1, round(len(words) * rate))):
        draw = rng.random()
        if draw < 0.7:
            parts[index] = rng.choice(vocabulary)
        elif draw < 0.85:
            parts[index] = ""
        else:
            parts[index] += " " + rng.choice(vocabulary)
    return "".join(parts)


def block(text: str, rate: float, rng: random.Random, vocabulary: Sequence[str]) -> str:
    """Words side by side are replaced."""
    parts, words = _split(text)
    num_changed = max(1, round(len(words) * rate))
    first = rng.randrange(0, max(1, len(words) - num_changed))
    for index in words[first : first + num_changed]:
        parts[index] = rng.choice(vocabulary)
    return "".join(parts)


def crop(text: str, rate: float, rng: random.Random, vocabulary: Sequence[str]) -> str:
    """The last words are dropped."""
    parts, _ = _split(text)
    num_kept = round(len(parts) // 2 * (1 - rate))
    return "".join(parts[: 2 * num_kept]).rstrip()


def shingles(words: Sequence[str]) -> set[int]:
    """Hashes of all runs of five words, for comparing in this process; of all words when they are fewer."""
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    return {hash(tuple(words[begin : begin + SHINGLE_WORDS])) for begin in range(last)}


def jaccard(one: set[int], other: set[int]) -> float:
    """Share of what is in either set that is in both."""
    num_shared = len(one & other)
    num_either = len(one) + len(other) - num_shared
    return num_shared / num_either if num_either else 1.0


class _Planter:
    """What is planted so far. Originals are taken from a shuffled pool in turn, each once if it lasts."""

    def __init__(self, records: Sequence[Record], rng: random.Random, num_per_kind: int):
        self._records = records
        self._rng = rng
        self._num_per_kind = num_per_kind
        self._vocabulary = _vocabulary(rng.sample(records, min(len(records), 2000)))
        self._pool = [each for each in records if 600 <= len(each.text) <= 60000 and len(each.text.split()) >= 60]
        rng.shuffle(self._pool)
        self._num_taken = 0
        self._planted: list[Record] = []
        self._truths: list[Truth] = []
        self._passages: dict[str, list[tuple[int, str]]] = {}

    def plant_copies(self, kind: str, rate: float, edit: Edit | None = None) -> None:
        """Plant changed copies, or exact ones."""
        for _ in range(self._num_per_kind):
            original = self._take()
            text = edit(original.text, rate, self._rng, self._vocabulary) if edit else original.text
            copy = Record(text, f"p{len(self._planted):07d}", f"planted:{kind}:{rate}")
            self._planted.append(copy)
            truth = {"kind": kind, "a": original.id, "b": copy.id}
            self._truths.append(truth | {"rate": rate} if edit else truth)

    def plant_passages(self) -> None:
        """Put passages into documents, each behind some line of its hosts."""
        for number in range(max(MIN_PASSAGES, self._num_per_kind // 8)):
            passage = self._take_passage()
            for _ in range(HOSTS_PER_PASSAGE):
                host = self._take()
                line_end = host.text.find("\n", self._rng.randrange(len(host.text)))
                at = line_end if line_end >= 0 else len(host.text)
                host.text = host.text[:at] + passage + host.text[at:]
                self._passages.setdefault(host.id, []).append((number, passage))

    def finish(self) -> tuple[list[Record], list[Truth]]:
        """All documents, shuffled; the truth, with likenesses between the texts as they have become."""
        for record in self._records:
            for number, passage in self._passages.get(record.id, ()):
                self._truths += _locate(number, passage.encode(), record)
        everything = [*self._records, *self._planted]
        self._rng.shuffle(everything)
        text_of = {record.id: record.text for record in everything}
        for truth in self._truths:
            if truth["kind"] == "substr":
                continue
            original, copy = text_of[truth["a"]], text_of[truth["b"]]
            if truth["kind"] == "exact" and original != copy:
                truth["kind"] = "near_exact"
            truth["j5"] = round(jaccard(shingles(original.lower().split()), shingles(copy.lower().split())), 4)
        return everything, self._truths

    def _take(self) -> Record:
        record = self._pool[self._num_taken % len(self._pool)]
        self._num_taken += 1
        return record

    def _take_passage(self) -> str:
        while True:
            text, num_chars = self._take().text, self._rng.choice(PASSAGE_CHARS)
            if len(text) > num_chars + 100:
                begin = self._rng.randrange(0, len(text) - num_chars)
                return "\n" + text[begin : begin + num_chars].strip() + "\n"


def _split(text: str) -> tuple[list[str], list[int]]:
    """Words and the blanks between them, in turn, and where the words are."""
    parts = WORDS_AND_BLANKS.split(text)
    return parts, [index for index in range(0, len(parts), 2) if parts[index]]


def _vocabulary(records: Iterable[Record]) -> list[str]:
    """Words of middling length from the beginnings of some documents, sorted."""
    words = {word for record in records for word in record.text.split()[:400]}
    return sorted(word for word in words if 2 <= len(word) <= 14)


def _locate(number: int, passage: bytes, record: Record) -> list[Truth]:
    """Where a passage lies; nowhere when a later one was put inside it."""
    start = record.text.encode().find(passage)
    if start < 0:
        return []
    return [{"kind": "substr", "passage": number, "id": record.id, "start": start, "end": start + len(passage)}]
