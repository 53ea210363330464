"""The fields of a record that go along with its document, as text that every later station can read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from megalite.corpus.conversations import MalformedRecordError
from megalite.corpus.documents import as_utf8
from megalite.corpus.exact_json import MOST_DEEP, depth
from megalite.corpus.source import DocumentSource

TOO_MANY_DIGITS = re.compile(r"\d{309}")
"""A whole number so long may be beyond what readers of later stations can hold, the largest float."""
TOO_DEEP = f"a kept field has more than {MOST_DEEP} groups one within another"


def kept_fields(fields: dict[str, Any], config: DocumentSource) -> str:
    """They are a JSON object: null for what is no number, a text for a whole number beyond all floats, and what is no
    UTF-8 spelt out.

    Raises:
        MalformedRecordError: groups are too deep one within another.
    """
    if not config.keep_fields:
        return ""
    kept = {name: fields[name] for name in config.keep_fields if name in fields}
    try:
        found = json.dumps(kept, ensure_ascii=False, default=str, allow_nan=False)
        found.encode()
    except (ValueError, RecursionError):  # no number, half of a surrogate pair, or too deep
        found = ""
    if (not found or found.count("[") + found.count("{") > MOST_DEEP) and depth(kept) > MOST_DEEP:
        raise MalformedRecordError(TOO_DEEP)
    if TOO_MANY_DIGITS.search(found):
        found = ""
    return found or json.dumps(_as_json(kept), ensure_ascii=False, default=str)


def _as_json(value: Any) -> Any:
    """The value with null for what is no number, and halves of surrogate pairs spelt out."""
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if is_within_floats(value) else str(value)
    if isinstance(value, dict):
        return {as_utf8(str(name)): _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def is_within_floats(value: int) -> bool:
    """Whether a float can be about as large."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


def id_of(fields: Mapping[str, Any], where: str, config: DocumentSource) -> str:
    """What a record is called, by itself or by where it stands.

    Raises:
        MalformedRecordError: its id cannot be written.
    """
    given = fields.get(config.id_field)
    try:
        return where if given is None else str(given)
    except (RecursionError, ValueError):
        raise MalformedRecordError("an id of too many digits, or groups one within another") from None


def spelt_out(record: Any) -> str:
    """A record that is put aside, for people."""
    try:
        spelt = json.dumps(record, ensure_ascii=False, default=str)
    except (RecursionError, TypeError, ValueError):
        return "(it cannot be shown: too many groups one within another, or names that are no texts)"
    return as_utf8(spelt)
