"""Some hundreds of documents to ask two programs about: real ones, and real ones bent until rules fire."""

from __future__ import annotations

import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

Bend = Callable[[str, random.Random], str]

MOST_CHARS = 5_000

NUM_FILES = 60
"""Of each kind."""


def real_documents() -> list[str]:
    """Python's own reference, its library's sources, descriptions of installed packages, licences."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    sources = [
        path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_FILES]
    ]
    packages = sorted(distributions(), key=lambda each: each.metadata["Name"].lower())[:NUM_FILES]
    readmes = [each.read_text("METADATA") or "" for each in packages]
    files = [
        Path(str(file.locate()))
        for each in packages
        for file in each.files or []
        if re.search(r"dist-info/.*LICEN[CS]E", str(file))
    ]
    licences = [path.read_text(encoding="utf-8", errors="replace") for path in files[:NUM_FILES] if path.is_file()]
    texts = [*topics, *sources, *readmes, *licences]
    return [text[:MOST_CHARS] for text in dict.fromkeys(texts) if text.strip()]


def bent_documents(texts: list[str], rng: random.Random) -> list[str]:
    """Each text once, bent by a few of BENDINGS; half of them cut to a few lines first, where shares are coarse."""
    bent = []
    for text in texts:
        lines = text.split("\n")
        if rng.random() < 0.5:
            start = rng.randrange(len(lines))
            lines = lines[start : start + rng.randrange(1, 30)]
        text = "\n".join(lines)
        for bend in rng.sample(BENDINGS, rng.randrange(1, 4)):
            text = bend(text, rng)
        bent.append(text)
    return bent


def _each_line(text: str, rng: random.Random, change: Callable[[str], str]) -> str:
    share = rng.random()
    return "\n".join(change(line) if rng.random() < share else line for line in text.split("\n"))


def _each_word(text: str, rng: random.Random, change: Callable[[str], str]) -> str:
    share = rng.random() ** 2
    return re.sub(r"\S+", lambda found: change(found[0]) if rng.random() < share else found[0], text)


def _repeat_lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    share = rng.random() / 2
    return "\n".join(rng.choice(lines) if rng.random() < share else line for line in lines)


def _repeat_paragraphs(text: str, rng: random.Random) -> str:
    paragraphs = text.split("\n\n")
    return "\n\n".join(paragraphs + rng.choices(paragraphs, k=rng.randrange(1, len(paragraphs) + 2)))


def _repeat_run(text: str, rng: random.Random) -> str:
    words = text.split()
    for _ in range(rng.randrange(1, 6)):
        start = rng.randrange(len(words)) if words else 0
        run = words[start : start + rng.randrange(2, 15)]
        for _ in range(rng.randrange(1, 12)):
            place = rng.randrange(len(words) + 1)
            words[place:place] = run
    return " ".join(words)


def _join_lines(text: str, rng: random.Random) -> str:
    return re.sub(r"\n", lambda _: rng.choice(["\n", " ", " "]), text)


def _lines_with(*ends: str) -> Bend:
    return lambda text, rng: _each_line(text, rng, lambda line: line + rng.choice(ends))


def _words_with(*others: str) -> Bend:
    """Some words replaced; `%` stands for the word."""
    return lambda text, rng: _each_word(text, rng, lambda word: rng.choice(others).replace("%", word))


def _end_in_citations(text: str, rng: random.Random) -> str:
    ends = (".", "?", " [12]", "[edit]", "[3].")
    return _each_line(text, rng, lambda line: line.rstrip(".!?") + rng.choice(ends))


def _shorten_lines(text: str, rng: random.Random) -> str:
    return _each_line(text, rng, lambda line: line[: rng.randrange(20, 40)])


def _blank(text: str, rng: random.Random) -> str:
    return _each_line(text, rng, lambda line: rng.choice(["", "  " + line, line + " \t", "\u3000", line + "\r"]))


def _make_lists(text: str, rng: random.Random) -> str:
    return _each_line(text, rng, lambda line: f"{rng.choice(' -')}{rng.choice('-•*')} {line}")


def _drop_stop_words(text: str, rng: random.Random) -> str:
    return re.sub(r"\b(the|be|to|of|and|that|have|with)\b", lambda found: rng.choice([found[0], "it"]), text)


def _end(text: str, rng: random.Random) -> str:
    return text + rng.choice(["\n", "\n\n", "\n \n", " ", ""])


BENDINGS: tuple[Bend, ...] = (
    _repeat_lines,
    _repeat_paragraphs,
    _repeat_run,
    _join_lines,
    _make_lists,
    _end_in_citations,
    _shorten_lines,
    _blank,
    _drop_stop_words,
    _end,
    _lines_with("...", "…", "....", " ...", ".", "!", '"'),
    _lines_with(" {x}.", " lorem ipsum.", " JavaScript.", " We use cookies."),
    _words_with("#%", "##", "%...", "…", "* * *"),
    _words_with("120", "7", "--", "(a)", "of", "a"),
    _words_with("%%%", "ſtraße", "漢字です。", "🙂", "→", "don't"),
)
"""Ways to bend a text, so that every rule meets documents on both sides of its threshold."""
