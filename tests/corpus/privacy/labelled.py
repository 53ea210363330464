"""Labelled lines for names, addresses, social security numbers and telephone numbers, made by code from lists.

A line is a form with places `{name}`, `{address}`, `{ssn}`, `{phone}`; what fills them is the label. Half of the given
names stand in megalite's list and half do not, so that recall is not that of a list looked up in itself. The lines
without a label look like names, addresses and numbers, and are none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

LISTED = [
    "James",
    "Mary",
    "Robert",
    "Patricia",
    "Thomas",
    "Angela",
    "Karl",
    "Ingrid",
    "Pierre",
    "Carmen",
    "Giovanni",
    "Fatima",
    "Priya",
    "Kenji",
    "Sergei",
]

UNLISTED = [
    "Ngozi",
    "Saoirse",
    "Wojciech",
    "Xiuying",
    "Thandiwe",
    "Gwyneira",
    "Eirlys",
    "Tadhg",
    "Oluwaseun",
    "Anneliese",
    "Hrafnkell",
    "Nguyet",
]

SURNAMES = (
    *("Smith", "Okafor", "Nowak", "Müller", "O'Connor", "McAllister", "García", "Rossi", "Tanaka", "Ivanov"),
    *("Schmidt-Bauer", "van der Berg", "de la Cruz", "Lindqvist", "Dubois", "Yılmaz", "Haddad", "Chakraborty"),
)

NAME_FORMS = (
    *(
        "{name} joined the company in 2011.",
        "The report was written by {name} and reviewed later.",
        "Yesterday {name} called.",
    ),
    *("Please ask Mr. {surname} about it.", "Dr. {name} will see you now.", "Frau {surname} ist heute nicht da."),
    *(
        "Dear {given},\nthank you for the letter.",
        "Hello, my name is {name}.",
        "Best regards,\n{name}\nSales",
        "Patient: {name}",
    ),
    *(
        "We met {name}'s sister.",
        "A letter to {name}, who lives abroad.",
        "Prof. {name} lehrt in Bonn.",
        "({name}, 2019)",
    ),
    *(
        "Contact: {name}, phone {phone}",
        "{name} lives at {address}.",
        "{name} (SSN {ssn})",
        "It was {name} who said so.",
    ),
)

US_STREETS = ("Oak Street", "North Maple Ave", "Martin Luther King Blvd", "5th Avenue", "Sunset Drive", "Old Mill Rd.")
US_TOWNS = ("Springfield, IL 62704", "New York, NY 10118-0110", "St. Paul, MN 55102", "San Jose, CA 95112")
UK_STREETS = ("Downing Street", "Baker Street", "The Avenue", "Church Lane", "Kings Road", "Rose Crescent")
UK_TOWNS = ("London SW1A 2AA", "Leeds, LS1 4AP", "Cambridge CB2 1TN", "Bath, Somerset BA1 1LT")
DE_STREETS = (
    "Hauptstraße",
    "Lange Straße",
    "Goetheallee",
    "Berliner Str.",
    "Am Markt",
    "Unter den Linden",
    "Karl-Marx-Platz",
)
DE_TOWNS = ("10115 Berlin", "50667 Köln", "79098 Freiburg", "D-80331 München", "60311 Frankfurt am Main")

ADDRESS_FORMS = (
    *(
        "Send it to {address}.",
        "Our office: {address}",
        "He moved to {address} in May.",
        "{address}\n",
        "Address: {address};",
    ),
    *("Die Firma sitzt in der {address}, seit 1990.", "Deliver to {address} before noon", "({address})"),
)

NUMBER_FORMS = (
    *(
        "SSN: {ssn}",
        "social security number {ssn} on file",
        "his SSN ({ssn}) was stolen",
        "Tel. {phone}",
        "call {phone} now",
    ),
    *("phone {phone}, SSN {ssn}", "{phone} or {phone}", "ssn={ssn}", "Fax: {phone}."),
)

PHONES = (
    "212-555-0147",
    "(415) 555-2671",
    "+1 202 555 0143",
    "+44 20 7946 0958",
    "030/1234567",
    "078-0512-1120",
    "012-345-6789",
)

NEGATIVES = (
    *(
        "In 2019 Wall Street fell by a third.",
        "Chapter 12 Boolean Algebra",
        "See Figure 3 and Table 12.",
        "Python 3 Way of life",
    ),
    *(
        "The University of Georgia and Virginia Tech played in May.",
        "Will Congress act? Mark the date.",
        "Rose and Grace are words.",
    ),
    *(
        "Elizabeth Street is closed on Monday.",
        "James Bay lies in Canada.",
        "The Victoria Falls are high.",
        "Peter and Paul met.",
    ),
    *(
        "Dear Sir or Madam,",
        "Dear Customer,",
        "Mr. Speaker, I rise.",
        "Name: Value",
        "Contact: Support",
        "class Thomas(Base):",
    ),
    *(
        "from michael import jackson",
        "self.john = John()",
        "John_Smith = 3",
        "JohnSmith",
        "x = 12 Street",
        "/home/Mary Jones/x",
    ),
    *(
        "Part 123-45-678 is sold out.",
        "ISBN 978-3-16-148410-0",
        "000-12-3456",
        "666-12-3456",
        "912-34-5678",
        "123-00-4567",
    ),
    *(
        "123-45-0000",
        "078-05-1120",
        "123 45 6789",
        "2024-01-31",
        "call 555-1234",
        "5551234567",
        "1,234,567,890",
        "10.0.0.1",
    ),
    *(
        "Bundesstraße 12 ist gesperrt.",
        "Die Straße 5 Meter weiter",
        "10115 Berlin",
        "PO Box",
        "a box 7",
        "Room 12 Court",
    ),
    *(
        "The Matthew effect and the Martin process",
        "Bernoulli and Euler",
        "St. John's wort",
        "Dr. No",
        "Mary, Queen of Scots",
    ),
    *(
        "12 Monkeys",
        "5 Golden Rings",
        "1984 by the author",
        "20 North",
        "7 Eleven",
        "300 Spartans",
        "50 Ways",
        "9 to 5",
    ),
    *(
        "The Thomas Jefferson Memorial opened.",
        "Samuel Johnson Prize",
        "3 Court Rulings",
        "2001 Space Road",
        "10 Drive",
    ),
    *(
        "March 5 Way",
        "in May 2020 Ocean Drive was flooded",
        "the 2020 Tesla Drive",
        "Sydney Opera",
        "Charlotte is a city.",
    ),
)
"""A few of them are beyond any rules, as things that are named after persons."""


class Label(NamedTuple):
    """What a line holds."""

    kind: str
    start: int
    end: int
    """In bytes."""


class LabelledLine(NamedTuple):
    """A line and all that is to be found in it."""

    text: str
    labels: list[Label]


def labelled_lines(num_each: int = 12, seed: int = 0) -> list[LabelledLine]:
    """So many lines of each form, and every negative one once."""
    rng = random.Random(seed)
    forms = (*NAME_FORMS, *ADDRESS_FORMS, *NUMBER_FORMS)
    lines = [_fill(form, rng) for form in forms for _ in range(num_each)]
    return [*lines, *(LabelledLine(text, []) for text in NEGATIVES)]


def _fill(form: str, rng: random.Random) -> LabelledLine:
    text, labels = b"", []
    for piece, place in _pieces(form):
        text += piece.encode()
        if place:
            kind = {"surname": "name", "given": "name", "ssn": "us_ssn"}.get(place, place)
            filling = FILLINGS[place](rng).encode()
            labels.append(Label(kind, len(text), len(text) + len(filling)))
            text += filling
    return LabelledLine(text.decode(), labels)


def _pieces(form: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"\{(\w+)\}", form)
    yield from zip(parts[::2], [*parts[1::2], ""], strict=True)


def _given(rng: random.Random) -> str:
    return rng.choice(rng.choice([LISTED, UNLISTED]))


def _name(rng: random.Random) -> str:
    middle = rng.choice(["", "", f"{rng.choice('ABCDEFG')}. "])
    return f"{_given(rng)} {middle}{rng.choice(SURNAMES)}"


def _address(rng: random.Random) -> str:
    form = rng.choice(["us", "us", "uk", "de", "de", "box"])
    number = rng.randint(1, 400)
    if form == "us":
        unit = rng.choice(["", "", " Apt 4B", ", Suite 200"])
        return f"{number} {rng.choice(US_STREETS)}{unit}, {rng.choice(US_TOWNS)}"
    if form == "uk":
        return f"{rng.choice(['', 'Flat 2, '])}{number} {rng.choice(UK_STREETS)}, {rng.choice(UK_TOWNS)}"
    if form == "de":
        return f"{rng.choice(DE_STREETS)} {number}{rng.choice(['', 'a', ' b'])}, {rng.choice(DE_TOWNS)}"
    return f"P.O. Box {number}, {rng.choice(US_TOWNS)}"


def _ssn(rng: random.Random) -> str:
    area = rng.choice([rng.randint(1, 665), rng.randint(667, 899)])
    return f"{area:03d}-{rng.randint(1, 99):02d}-{rng.randint(1, 9999):04d}"


FILLINGS = {
    "name": _name,
    "surname": lambda rng: rng.choice([surname for surname in SURNAMES if surname[0].isupper()]),
    "given": _given,
    "address": _address,
    "ssn": _ssn,
    "phone": lambda rng: rng.choice(PHONES),
}
