"""Whether a candidate is a postal address: of the United States, of the United Kingdom, or of Germany and Austria.

    1600 Amphitheatre Parkway, Mountain View, CA 94043     number, name, kind of street; unit, town, state, ZIP code
    Flat 2, 10 Downing Street, London SW1A 2AA             the same with a postcode
    Lange Straße 12a, 10115 Berlin                         name with a kind of street, number; postcode, town
    Unter den Linden 5, 10117 Berlin                       any name, if number, postcode and town follow
    P.O. Box 123, Springfield, IL 62704; Postfach 10 20 30

A town or a postcode alone is none. Forms of other countries are not known.
"""

from __future__ import annotations

import re

from megalite.corpus.privacy.window import Span, Window
from megalite.corpus.privacy.word_lists import GERMAN_STREETS, STREETS

NO_WORD = rb"(?![0-9A-Za-z_\x80-\xff])"

WORD = rb"(?:[A-Z][A-Za-z\x80-\xff'.-]{0,24}|\d{1,3}(?:st|nd|rd|th))"

DIRECTION = rb"(?:(?:NE|NW|SE|SW|N|S|E|W)\.?|North|South|East|West)"

STREET = re.compile(
    rb"\d{1,5}(?:[A-Za-z]|-\d{1,4})? (?:%b ){1,4}?(?:%b)\.?%b(?: %b%b)?"
    % (WORD, b"|".join(street.encode() for street in STREETS), NO_WORD, DIRECTION, NO_WORD)
)

BEHIND = re.compile(
    rb"(?:,? (?:Apt|Apartment|Suite|Ste|Unit|Flat|Floor|Room)\.? ?#?[0-9A-Za-z-]{1,6}|,? #[0-9A-Za-z-]{1,6})?"
    rb"(?:,?[ \n][A-Z][A-Za-z.' -]{1,40}?,? [A-Z]{2},? \d{5}(?:-\d{4})?%b"
    rb"|(?:,[ \n][A-Z][A-Za-z' -]{1,30}?){0,3}?,?[ \n][A-Z]{1,2}\d[0-9A-Z]? \d[A-Z]{2}%b)?" % (NO_WORD, NO_WORD)
)
"""Unit; then town, state and ZIP code, or parts of a town and a postcode."""

FLAT_BEFORE = re.compile(rb"(?:Flat|Apartment|Apt\.?|Unit|Suite) [0-9A-Za-z]{1,4},? \Z")

NO_HOUSE_BEFORE = re.compile(rb"(?:[0-9A-Za-z][.,:/-]|[-#$_/=+*.\x80-\xff])\Z")
"""Before a number that is a part of something else."""

YEAR = re.compile(rb"(?:19|20)\d\d ")

YEAR_BEFORE = re.compile(
    rb"(?:^|[^A-Za-z])(?:in|since|of|by|from|until|till|during|the|early|late|and|[Ii]n|january|february|march|april|may"
    rb"|june|july|august|september|october|november|december),? \Z",
    re.IGNORECASE,
)
"""Before 2019 it makes a year of it, and `Wall Street` what happened then."""

HOUSE_NUMBER = re.compile(rb"\d{1,4}(?: ?[a-z](?![A-Za-z])|-\d{1,4})?(?![0-9A-Za-z_%])")

GERMAN_TOWN = re.compile(
    rb"(?:,|,?[ \n])[ \n]?(?:(?:D|A|CH)-)?\d{4,5} [A-Z\xc3][a-z\x80-\xff]{1,30}"
    rb"(?:[ -](?:am |an der |im |in der |ob der )?[A-Z\xc3][a-z\x80-\xff]{1,30})?"
)

GERMAN_STREET_BEFORE = re.compile(
    rb"(?<![0-9A-Za-z_\x80-\xff])(?!(?:Die|Der|Das|Diese|Dieser|Eine|Ein|Einer|Jede|Jeder|Keine|Auf|In|An)[ -])"
    rb"(?:[A-Z\xc3][a-z\x80-\xff]{1,30}(?:-[A-Z\xc3][a-z\x80-\xff]{1,30}){0,3}[ -]?(?:%b)) \Z"
    % b"|".join(
        b"[%b%b]%b" % (each[:1], each[:1].upper(), each[1:].replace(b".", b"\\."))
        for each in (street.encode() for street in GERMAN_STREETS)
    )
)

HIGHWAY = re.compile(rb"(?:Bundes|Land|Kreis|Auto|Europa|Reichs)(?:stra|str)|(?:Rundweg|Radweg|Wanderweg)")
"""Roads with numbers of their own."""

NAME_BEFORE = re.compile(
    rb"(?<![0-9A-Za-z_\x80-\xff])(?:[A-Z\xc3][A-Za-z\x80-\xff.-]{1,30}(?: (?:den|der|dem|des))? ){1,3}\Z"
)
"""Of any street."""

BOX_BEFORE = re.compile(rb"(?<![0-9A-Za-z_])(?:(?:P\. ?O\.|PO|P\.O|Post Office) [Bb]ox|Postfach) \Z")

BOX_NUMBER = re.compile(rb"\d{1,6}(?: \d\d(?!\d)){0,2}%b" % NO_WORD)

MAX_BEFORE = 80


def find_address(window: Window) -> Span | None:
    """The address whose house or box has this number."""
    before = window.before(MAX_BEFORE)
    if NO_HOUSE_BEFORE.search(before):
        return None
    return _find_english(window, before) or _find_german(window, before) or _find_box(window, before)


def _find_english(window: Window, before: bytes) -> Span | None:
    match = window.match(STREET)
    if match is None or (YEAR.match(match[0]) and YEAR_BEFORE.search(before)):
        return None
    flat = FLAT_BEFORE.search(before)
    start = window.place - (len(before) - flat.start() if flat else 0)
    return start, _end_of(window, match.end(), BEHIND)


def _find_german(window: Window, before: bytes) -> Span | None:
    number = window.match(HOUSE_NUMBER)
    if number is None:
        return None
    end = _end_of(window, number.end(), GERMAN_TOWN)
    street = GERMAN_STREET_BEFORE.search(before)
    if street is None and end > number.end():
        street = NAME_BEFORE.search(before)
    if street is None or HIGHWAY.match(street[0]):
        return None
    return window.place - (len(before) - street.start()), end


def _find_box(window: Window, before: bytes) -> Span | None:
    box, number = BOX_BEFORE.search(before), window.match(BOX_NUMBER)
    if box is None or number is None:
        return None
    end = _end_of(window, number.end(), GERMAN_TOWN)
    return window.place - (len(before) - box.start()), max(end, _end_of(window, number.end(), BEHIND))


def _end_of(window: Window, end: int, pattern: re.Pattern[bytes]) -> int:
    """Where what may follow ends."""
    match = window.match(pattern, end - window.place)
    return end if match is None else match.end()
