"""A checksum of a JSON text inside the text itself, so that a flipped byte anywhere is found.

{
  "checksum": "xxh3_128 of these bytes, with 32 zeros in this place",
"""

from __future__ import annotations

import re

import xxhash

NO_CHECKSUM = "0" * 32

_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{32})"')


def seal(text: str) -> str:
    """Put the checksum in the place of NO_CHECKSUM, the first one in the text."""
    assert f'"checksum": "{NO_CHECKSUM}"' in text
    return text.replace(NO_CHECKSUM, xxhash.xxh3_128_hexdigest(text.encode()), 1)


def is_sealed(text: str) -> bool:
    """Whether a text has its own checksum, and is what was sealed."""
    found = _CHECKSUM.search(text)
    if found is None:
        return False
    start, stop = found.span(1)
    return xxhash.xxh3_128_hexdigest((text[:start] + NO_CHECKSUM + text[stop:]).encode()) == found[1]
