"""JSON files that the data tools read back: a closed world. Every key is known and of its type, or the file is damaged.

Whoever reads a value out of a file must not meet a list where a number was written, a path out of its folder, or a
million levels of brackets. So what a file may hold is declared once, as a `Record`, and `read_record` gives that or
says by name what it found instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from megalite.errors import DataError

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
