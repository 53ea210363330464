"""JSON whose whole numbers keep all digits: orjson is fast, and makes floats of those of more than 64 bits."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import orjson

EXACT_BELOW = 2.0**63
"""Floats of at least this size may have been whole numbers with other digits."""

MOST_DEEP = 100
"""Groups within groups in what is kept of a record; the readers of later stations end at 254."""


def loads(content: bytes, names: Collection[str]) -> Any:
    """What orjson makes of it, with the fields of these names as they are written; in an array, those of each group.

    Raises:
        ValueError: it is no JSON.
    """
    found = orjson.loads(content)
    groups = found if isinstance(found, list) else [found]
    wanted = [(group, name) for group in groups if isinstance(group, dict) for name in names if name in group]
    if not any(_may_have_lost_digits(group[name]) for group, name in wanted):
        return found
    try:
        exact = json.loads(content)
    except (ValueError, RecursionError):  # a number of thousands of digits, or groups too deep
        return found
    for group, written in zip(groups, exact if isinstance(exact, list) else [exact], strict=True):
        if isinstance(group, dict):
            group.update({name: written[name] for name in names if name in group})
    return found


def with_field(content: str, name: str, value: Any) -> str:
    """A JSON object, or nothing, with one more field or another value in it; all others are as they were.

    Raises:
        TypeError: JSON cannot hold the value.
    """
    added = orjson.dumps({name: value}).decode()
    if content in ("", "{}"):
        return added
    is_plain = content.startswith("{") and content.endswith("}") and content[1:-1].strip() and "\\u" not in content
    if not is_plain or orjson.dumps(name).decode() in content:
        return json.dumps({**json.loads(content), **json.loads(added)}, ensure_ascii=False)
    return f"{content[:-1]},{added[1:]}"


def depth(value: Any) -> int:
    """How many groups are one within another."""
    found, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list | tuple)]:
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        found += 1
    return found


def _may_have_lost_digits(value: Any) -> bool:
    """Whether there is a float in it that may have been a whole number."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, float):
            if abs(each) >= EXACT_BELOW and each.is_integer():
                return True
        elif isinstance(each, list | dict):
            left += each.values() if isinstance(each, dict) else each
    return False
