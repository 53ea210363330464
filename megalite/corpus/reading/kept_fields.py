"""The fields of a record that go along with its document, as text that every later station can read."""

from __future__ import annotations

import json
import math
from typing import Any

from megalite.corpus.conversations import MalformedRecordError
from megalite.corpus.documents import as_utf8
from megalite.corpus.exact_json import MOST_DEEP, depth
from megalite.corpus.source import DocumentSource

TOO_DEEP = f"a kept field has more than {MOST_DEEP} groups one within another"


def kept_fields(fields: dict[str, Any], config: DocumentSource) -> str:
    """They are a JSON object: null for what is no number, and what is no UTF-8 spelt out.

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
    return found or json.dumps(_as_json(kept), ensure_ascii=False, default=str)


def _as_json(value: Any) -> Any:
    """The value with null for what is no number, and halves of surrogate pairs spelt out."""
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {as_utf8(str(name)): _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value
