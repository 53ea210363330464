"""Whether a candidate is a person's name: by a list of given names, by a title, or by what introduces it.

    Marie Curie                a given name of the list, initials, particles, one surname
    Dr. Ngozi Okafor           a title, up to two words that no list needs to know
    Dear Hiroshi,              a greeting, or `my name is`

There is no model behind it. It does not see given names that are not in the list unless something introduces them,
names written as `Curie, Marie`, in small or in capital letters alone or in other scripts than the Latin, nor a second
surname; and it takes the names of the dead and of the famous, and of things named after people, as well as those of
anybody else. tests/corpus/privacy/test_people.py measures it.
"""

from __future__ import annotations

import re

from megalite.corpus.privacy.window import Span, Window
from megalite.corpus.privacy.word_lists import (
    GIVEN_NAMES,
    INTRODUCTIONS,
    NO_SURNAMES,
    ONE_WORD_IS_ENOUGH,
    PARTICLES,
    TITLES,
)

UPPER = rb"(?:[A-Z]|\xc3[\x80-\x96\x98-\x9e])"

LOWER = rb"(?:[a-z]|\xc3[\x9f-\xb6\xb8-\xbf]|[\xc4\xc5][\x80-\xbf])"

CAPITALISED = rb"(?:Ma?c|[OD](?:'|\xe2\x80\x99))?%b%b{1,20}(?:-%b%b{1,20})?" % (UPPER, LOWER, UPPER, LOWER)

WORDS = re.compile(
    rb"(?:%b|[A-Z]\.)(?: (?:%b|[A-Z]\.|%b)(?![0-9A-Za-z_\x80-\xff])){0,6}"
    % (CAPITALISED, CAPITALISED, b"|".join(sorted(PARTICLES)))
)
"""A capitalised word and those behind it that may belong to one name."""

TITLE_BEFORE = re.compile(rb"(?<![0-9A-Za-z_])(%b)\.?[ \n]{1,3}\Z" % b"|".join(TITLES), re.IGNORECASE)

INTRODUCTION_BEFORE = re.compile(
    rb"(?<![0-9A-Za-z_])(%b)[ \n]{1,3}\Z" % b"|".join(sorted(INTRODUCTIONS, reverse=True)), re.IGNORECASE
)

MAX_BEFORE = 24

MAX_UNLISTED = 2
"""Words behind a title or an introduction that are taken without being in a list."""


def find_name(window: Window) -> Span | None:
    """The name that begins with this capital."""
    before = window.before(MAX_BEFORE)
    if before[-1:] in (b"/", b"\\", b"@", b".", b"#", b"$", b"%", b"&", b"<"):
        return None  # a path, an address, a name in a program
    match = window.match(WORDS)
    if match is None or _goes_on(window, match.end()):
        return None
    words = match[0].split(b" ")
    if (title := TITLE_BEFORE.search(before)) is not None and not title[1].isupper():  # MS Windows, DR Congo
        return _span(window, _count_words(words, unlisted=MAX_UNLISTED), words)
    introduced = INTRODUCTION_BEFORE.search(before)
    if introduced is not None:
        count = _count_words(words, unlisted=MAX_UNLISTED)
        if count >= 2 or (count == 1 and introduced[1].lower() in ONE_WORD_IS_ENOUGH):
            return _span(window, count, words)
        return None
    count = _count_words(words, unlisted=1)
    return _span(window, count, words) if count >= 2 and words[0] in GIVEN_NAMES else None


def _goes_on(window: Window, end: int) -> bool:
    """Whether the last word is only the beginning of a longer one, or the name of something in a program."""
    then = window.byte_at(end)
    return then.isalnum() or then in (b"_", b"(", b"[", b"=", b"@", b"\\") or then >= b"\x80"


def _count_words(words: list[bytes], *, unlisted: int) -> int:
    """How many words from the first on make a name: given names and initials, particles, and so many others.

    A name ends with a word: particles and initials at its end do not count.
    """
    count, others = 0, 0
    for number, word in enumerate(words, 1):
        if word.lower() in PARTICLES or word.endswith(b"."):
            continue
        if word in NO_SURNAMES:
            break
        if word not in GIVEN_NAMES:
            others += 1
        count = number
        if others == unlisted:
            break
    return count


def _span(window: Window, count: int, words: list[bytes]) -> Span | None:
    return (window.place, window.place + len(b" ".join(words[:count]))) if count else None
