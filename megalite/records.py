"""JSON files that are read back: a closed world. Every key is known and of its type, or the file is damaged.

Whoever reads a value out of a file must not meet a list where a number was written, a path out of its folder, or a
million levels of brackets. So what a file may hold is declared once, as a `Record`, and `read_record` gives that or
says by name what it found instead. A text may also hold a checksum of itself (`seal`), so that a flipped byte anywhere
is found:

    {
      "checksum": "xxh3_128 of these bytes, with 32 zeros in this place",
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from megalite.errors import DataError

NO_CHECKSUM = "0" * 32

_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{32})"')

SHOWN_PROBLEMS = 3

SHOWN_CHARS = 60
"""Of a wrong value."""


class Record(BaseModel):
    """What a file holds: no other keys, no other types (`1.0` and `"1"` are no whole numbers)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OpenRecord(Record):
    """The same for what others write: keys that nobody here reads are left alone."""

    model_config = ConfigDict(extra="ignore")


RecordT = TypeVar("RecordT", bound=BaseModel)


def read_record(path: Path, kind: type[RecordT], advice: str) -> RecordT:
    """The content of a JSON file.

    Args:
        path: the file.
        kind: what it may hold.
        advice: what to do when it holds something else.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it cannot be read, or holds something else.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); see to the disk") from error
    return parse_record(content, kind, path, advice)


def parse_record(content: bytes | str, kind: type[RecordT], place: Path | str, advice: str) -> RecordT:
    """The content of a JSON text.

    Args:
        content: the text.
        kind: what it may hold.
        place: where it was found, for messages.
        advice: what to do when it holds something else.

    Raises:
        DataError: it holds something else.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise DataError(f"{place}: damaged: {explain(error)}; {advice}") from error


def parse_json(content: bytes, place: Path | str, advice: str) -> Any:
    """Plain data from a JSON text of any shape; numbers may be of any length, and brackets some hundred deep.

    Raises:
        DataError: it is no JSON.
    """
    try:
        return from_json(content)
    except ValueError as error:
        raise DataError(f"{place}: damaged: not JSON: {error}; {advice}") from error


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


def explain(error: ValidationError) -> str:
    """The first complaints, each with the way to the value."""
    found = error.errors(include_url=False, include_context=False)
    texts = [_sentence(details["loc"], details["msg"], details["type"], details["input"]) for details in found]
    more = f" and {len(texts) - SHOWN_PROBLEMS} more" if len(texts) > SHOWN_PROBLEMS else ""
    return ", ".join(texts[:SHOWN_PROBLEMS]) + more


def _sentence(keys: tuple[int | str, ...], message: str, kind: str, value: Any) -> str:
    place = ".".join(map(str, keys))
    if kind == "json_invalid":
        return f"not JSON: {message.removeprefix('Invalid JSON: ')}"
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden":
        return f"{place} is unknown here"
    text = repr(value)
    shown = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
    expected = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{place or 'the file'} is {shown}, expected {expected}"
