"""Which licence a document is under, and whether it is one of those that a recipe accepts.

    first lines --SPDX-License-Identifier--> expression  \\
    first bytes --sentences of known licences--> names    >  the first that says anything --> accepted, refused, unknown
    metadata    --a field of the source--> names         /

A file's own word comes before that of the repository around it, which the metadata tell. Names are SPDX identifiers; of
an expression, `OR` needs one accepted side, `AND` both, and an exception behind `WITH` only adds permissions. Where
several licences are found beside each other, as a list in the metadata or by their sentences, all must be accepted.

This reads what is written. That a text was put under a licence by somebody who had no right to do so cannot be seen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from megalite.texts import Texts

UNKNOWN = "unknown"

HEAD_BYTES = 8000
"""Of a document, in which its licence is looked for."""

MAX_SHOWN = 60
"""Characters of a name in counts and reasons."""

SPDX = re.compile(rb"SPDX-License-Identifier:[ \t]*([^\r\n]{1,200})")

COMMENT_END = re.compile(r"\s*(?:\*/|-->|\*\)|--\}\}|#\}|\"\"\").*\Z")

TOKEN = re.compile(r"\(|\)|[^\s()]+")

Sentence = tuple[str, bytes, bytes]
"""An identifier; what the text holds, in small letters and without punctuation, parts that stand apart with & between
them; and what it must not hold."""

BSD = b"redistribution and use in source and binary forms with or without modification are permitted"

NEITHER_NAME = b"neither the name"

LATER = b"any later version"

SENTENCES: tuple[Sentence, ...] = (
    (
        "MIT",
        b"permission is hereby granted free of charge to any person obtaining a copy of this software and associated "
        b"documentation files",
        b"",
    ),
    ("Apache-2.0", b"licensed under the apache license version 2 0", b""),
    ("Apache-2.0", b"apache license version 2 0 january 2004", b""),
    ("MIT", b"under the mit license", b""),
    ("BSD-3-Clause", b"bsd 3 clause license", b""),
    ("BSD-2-Clause", b"bsd 2 clause license", b""),
    ("BSD-3-Clause", BSD + b"&" + NEITHER_NAME, b""),
    ("BSD-2-Clause", BSD, NEITHER_NAME),
    (
        "ISC",
        b"permission to use copy modify and or distribute this software for any purpose with or without fee is hereby "
        b"granted&provided that the above copyright notice",
        b"",
    ),
    (
        "0BSD",
        b"permission to use copy modify and or distribute this software for any purpose with or without fee is hereby "
        b"granted",
        b"provided that the above copyright notice",
    ),
    ("MPL-2.0", b"subject to the terms of the mozilla public license v 2 0", b""),
    ("BSL-1.0", b"distributed under the boost software license version 1 0", b""),
    ("Unlicense", b"this is free and unencumbered software released into the public domain", b""),
    (
        "Zlib",
        b"this software is provided as is without any express or implied warranty in no event will the authors",
        b"",
    ),
    ("PSF-2.0", b"licensed to psf under a contributor agreement", b""),
    ("CC0-1.0", b"cc0 1 0 universal", b""),
    ("EPL-2.0", b"eclipse public license v2 0", b""),
    ("EPL-2.0", b"eclipse public license 2 0", b""),
    *(
        (f"{name}-{version}.{minor}-{kind}", b"gnu %b general public license&%b" % (word, of_version), without)
        for name, word, versions in (
            ("GPL", b"", ((2, 0), (3, 0))),
            ("LGPL", b"lesser", ((2, 1), (3, 0))),
            ("LGPL", b"library", ((2, 0),)),
            ("AGPL", b"affero", ((3, 0),)),
        )
        for version, minor in versions
        for kind, with_it, without in (("or-later", b"&" + LATER, b""), ("only", b"", LATER))
        for of_version in (b"version %d%b" % (version, b" %d" % minor if minor else b"") + with_it,)
    ),
)
"""How the licences that files quote most begin, or name themselves in a file's head."""


HINTS = (b"licens", b"permi", b"unencumbered", b"cc0", b"as-is")
"""Each sentence has one of them."""


class LicensedBatch(NamedTuple):
    """The licences of some documents."""

    names: list[str]
    """What was found for each: an identifier, an expression, several joined by AND, or UNKNOWN."""
    accepted: np.ndarray
    """bool [documents]; false where nothing was found."""
    num_described: int
    """Documents whose metadata name a licence, whatever their texts say."""


def find_licenses(texts: Texts, metadata: pa.Array, field: str | None, accepted: Collection[str]) -> LicensedBatch:
    """The licences of a batch.

    Args:
        texts: of the documents.
        metadata: of the same, JSON objects or empty; None for none.
        field: of the metadata that names the licence, or a list of licences; None looks at the texts alone.
        accepted: SPDX identifiers; the case of letters does not count.
    """
    wanted = {name.lower() for name in accepted}
    names, fits, num_described = [], np.zeros(len(texts), bool), 0
    for number, described in enumerate([""] * len(texts) if metadata is None else metadata.to_pylist()):
        start = int(texts.offsets[number])
        head = texts.buffer[start : min(start + HEAD_BYTES, int(texts.offsets[number + 1]))].tobytes()
        of_metadata = list(_of_metadata(described, field))
        num_described += bool(of_metadata)
        expressions = list(_of_head(head)) or of_metadata
        names.append(" AND ".join(expressions)[:MAX_SHOWN] or UNKNOWN)
        fits[number] = bool(expressions) and all(is_accepted(each, wanted) for each in expressions)
    return LicensedBatch(names, fits, num_described)


def is_accepted(expression: str, accepted: Collection[str]) -> bool:
    """Whether an SPDX expression permits what its accepted licences permit.

    Args:
        expression: an identifier, or several with AND, OR, WITH and brackets.
        accepted: identifiers in small letters. `X-or-later` and `X+` are names of their own.

    Returns:
        False too for what is no expression.
    """
    tokens = [token.lower() for token in TOKEN.findall(expression)]
    place, verdict = _read_or(tokens, 0, accepted, 0)
    return verdict and place == len(tokens)


MAX_DEPTH = 20
"""Brackets in brackets of an expression."""


def _read_or(tokens: list[str], place: int, accepted: Collection[str], depth: int) -> tuple[int, bool]:
    place, verdict = _read_and(tokens, place, accepted, depth)
    while place < len(tokens) and tokens[place] in ("or", "/"):
        place, other = _read_and(tokens, place + 1, accepted, depth)
        verdict = verdict or other
    return place, verdict


def _read_and(tokens: list[str], place: int, accepted: Collection[str], depth: int) -> tuple[int, bool]:
    place, verdict = _read_one(tokens, place, accepted, depth)
    while place < len(tokens) and tokens[place] == "and":
        place, other = _read_one(tokens, place + 1, accepted, depth)
        verdict = verdict and other
    return place, verdict


def _read_one(tokens: list[str], place: int, accepted: Collection[str], depth: int) -> tuple[int, bool]:
    """An identifier, perhaps with an exception, or what stands in brackets; a mistake is not accepted."""
    if place >= len(tokens) or depth > MAX_DEPTH:
        return len(tokens) + 1, False
    if tokens[place] == "(":
        place, verdict = _read_or(tokens, place + 1, accepted, depth + 1)
        closed = place < len(tokens) and tokens[place] == ")"
        return (place + 1, verdict) if closed else (len(tokens) + 1, False)
    name, place = tokens[place], place + 1
    if place + 1 < len(tokens) and tokens[place] == "with":
        return place + 2, name in accepted or f"{name} with {tokens[place + 1]}" in accepted
    return place, name in accepted


def _of_head(head: bytes) -> Iterator[str]:
    """The expressions that a file's head names, or else the licences whose sentences stand in it."""
    found = SPDX.findall(head)
    if found:
        lines = (COMMENT_END.sub("", line.decode("utf-8", "replace")).strip() for line in found)
        yield from dict.fromkeys(line for line in lines if line)
        return
    small = head.lower()
    if not any(hint in small for hint in HINTS):
        return  # as most files
    words = re.sub(rb"[^a-z0-9\x80-\xff]+", b" ", small)
    known = [name for name, holds, lacks in SENTENCES if _holds(words, holds) and not (lacks and lacks in words)]
    yield from dict.fromkeys(known)


def _holds(words: bytes, parts: bytes) -> bool:
    return all(part.replace(b"  ", b" ") in words for part in parts.split(b"&"))


def _of_metadata(described: str, field: str | None) -> Iterator[str]:
    """The licence that the metadata name, or all of a list."""
    if not described or field is None:
        return
    value = orjson.loads(described).get(field)
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and (name := each.strip()):
            yield name
