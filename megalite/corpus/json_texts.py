"""The texts inside of JSON: what a tool is called with, and what it says of itself. A text that is JSON in turn, as the
arguments of a call are, is gone through as well, and is valid JSON afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megalite.corpus.exact_json import MOST_DEEP, depth

Visit = Callable[[str, str], str]
"""Gets a text, and the name of the field that it stands in ("" where in none); gives what comes in its place."""

SMALLEST_TELLING = 10**6
"""Whole numbers of at least this size, a card's say, are shown to a visitor as texts."""


def visit_texts(value: Any, visit: Visit, name: str = "", *, unpack: bool = True) -> Any:
    """The value with what a visitor puts in the place of its texts, names of fields included.

    Args:
        value: JSON; not changed.
        visit: called for each text, always in the same order.
        name: of the field that holds it.
        unpack: whether texts that are JSON themselves are gone through.
    """
    if isinstance(value, str):
        inner = _json_in(value) if unpack else None
        if inner is None:
            return visit(value, name)
        changed = visit_texts(inner, visit, name, unpack=False)
        return value if changed == inner else json.dumps(changed, ensure_ascii=False)
    if isinstance(value, dict):
        group: dict[str, Any] = {}
        for key, each in value.items():
            key_now = visit(key, "")
            while key_now in group:  # two names that became the same
                key_now += "_"
            group[key_now] = visit_texts(each, visit, key, unpack=unpack)
        return group
    if isinstance(value, list):
        return [visit_texts(each, visit, name, unpack=unpack) for each in value]
    if isinstance(value, int) and abs(value) >= SMALLEST_TELLING:
        digits = str(value)
        changed = visit(digits, name)
        return value if changed == digits else changed
    return value


def spelt_out(value: Any) -> str:
    """JSON for people and for rules: a field a line, without quotes, braces and escapes."""
    return "\n".join(_lines(value, unpack=True))


def _lines(value: Any, *, unpack: bool) -> list[str]:
    if isinstance(value, str):
        inner = _json_in(value) if unpack else None
        return [value] if inner is None else _lines(inner, unpack=False)
    if isinstance(value, list):
        return [line for each in value for line in _lines(each, unpack=unpack)]
    if not isinstance(value, dict):
        return [json.dumps(value, default=str)]
    lines: list[str] = []
    for name, each in value.items():
        own = _lines(each, unpack=unpack)
        lines += [f"{name}: {own[0]}"] if len(own) == 1 else [f"{name}:", *own]
    return lines


def _json_in(text: str) -> dict[str, Any] | list[Any] | None:
    """The group that a text is when it is read as JSON, if it is one."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # no JSON, half of a surrogate pair, or too deep
        return None
    return found if depth(found) <= MOST_DEEP else None
