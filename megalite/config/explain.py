"""Pydantic's complaints as sentences for the user: what was found, what was expected, what to do.

What a setting expects is read from the JSON schema that pydantic makes of the sections, so no wording is kept beside
them that could come to differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megalite.errors import did_you_mean
from megalite.section import LARGEST_NUMBER, Section

Node = dict[str, Any]
"""A node of the JSON schema."""

UPPER_BOUNDS = {"maximum", "exclusiveMaximum"}
"""What a setting has that is bounded more tightly than all numbers are."""

LONGEST_FOUND = 60
"""Characters of a wrong value that a message shows."""


def explain(error: ValidationError, kind: type[Section]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield, for each complaint about data for `kind`, the keys that lead to the setting and a sentence about it."""
    settings = _Settings(kind)
    errors, told = error.errors(), set[tuple[int | str, ...]]()
    for details in errors:
        keys = settings.union_on_the_way(details["loc"])
        if keys is not None:  # pydantic complains of each alternative by itself
            of_all = (each for each in errors if each["loc"][:-1] == keys)
            whole = next(of_all, details)
            if keys not in told:
                yield tuple(map(str, keys)), _sentence({**whole, "type": "union", "loc": keys}, settings)
            told.add(keys)
            continue
        if details["type"] == "too_short" and any(_is_inside(other["loc"], details["loc"]) for other in errors):
            continue  # of a list whose wrong values do not count: they have their own complaints
        yield tuple(str(key) for key in details["loc"]), _sentence(details, settings)


def _is_inside(keys: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(keys) > len(outer) and keys[: len(outer)] == outer


def _sentence(details: ErrorDetails, settings: _Settings) -> str:
    keys, found = details["loc"], details["input"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(keys, settings)
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    setting = settings.at(keys)
    if setting is None:
        return f"found {_found(found)}: {details['msg']}"
    is_beyond_all = details["type"] in ("too_large", "finite_number") and not setting.keys() & UPPER_BOUNDS
    bound = f", and at most {LARGEST_NUMBER:.2g}" if is_beyond_all else ""
    bound = ", and none nearer to 0 than 2^-126 (fp32 may have 0 for it)" if details["type"] == "too_small" else bound
    expected = f"expected {_expected(setting)}{bound}{_meaning(setting)}"
    if details["type"] == "missing":
        return f"missing; {expected}"
    hint = did_you_mean(found, _choices(setting)) if isinstance(found, str) else ""
    return f"found {_found(found)}{hint}, {expected}"


def _unknown_key(keys: tuple[int | str, ...], settings: _Settings) -> str:
    """Suggest a key of the same section that reads alike, else one of another section."""
    name = str(keys[-1])
    siblings = (settings.at(keys[:-1]) or {}).get("properties", {})
    hint = did_you_mean(name, siblings)
    if not hint:
        elsewhere = settings.by_last_key()
        near = [name] if name in elsewhere else [key for key in elsewhere if did_you_mean(name, [key])]
        options = [option for key in near for option in elsewhere[key]]
        hint = f" (did you mean {' or '.join(options)}?)" if 0 < len(options) <= 3 else ""
    if not hint:
        hint = f"; known here: {', '.join(siblings)}" if siblings else "; there are no settings here"
    return f"unknown key{hint}"


@cache
def _schema(kind: type[Section]) -> Node:
    """Made once: it takes longer than everything else about a config."""
    return kind.model_json_schema()


class _Settings:
    """The JSON schema of a section and all below it, with references followed.

    In the nodes it hands out, a null alternative has become the key `nullable`, and others the key `alternatives`.
    """

    def __init__(self, kind: type[Section]):
        self._root = _schema(kind)

    def at(self, keys: tuple[int | str, ...]) -> Node | None:
        """The setting that keys lead to; None for one that the schema leaves open."""
        node = self._root
        for key in keys:
            if isinstance(key, int):
                prefix = node.get("prefixItems", [])
                inner = prefix[key] if key < len(prefix) else node.get("items")
            else:
                open_ended = node.get("additionalProperties")
                inner = node.get("properties", {}).get(key, open_ended if isinstance(open_ended, dict) else None)
            if inner is None:
                return None
            node = self._resolved(inner)
        return node

    def union_on_the_way(self, keys: tuple[int | str, ...]) -> tuple[int | str, ...] | None:
        """The keys of a setting on the way whose value may be of several kinds; None where there is none."""
        passed = (keys[:number] for number in range(1, len(keys)))
        return next((each for each in passed if "alternatives" in (self.at(each) or {})), None)

    def by_last_key(self) -> dict[str, list[str]]:
        """Dotted names of all settings that are not sections, by their last part."""
        names: dict[str, list[str]] = {}

        def collect(node: Node, prefix: tuple[str, ...]) -> None:
            for key, child in node.get("properties", {}).items():
                inner = self._resolved(child)
                if "properties" in inner:
                    collect(inner, (*prefix, key))
                else:
                    names.setdefault(key, []).append(".".join((*prefix, key)))

        collect(self._root, ())
        return names

    def _resolved(self, node: Node) -> Node:
        description = {"description": node["description"]} if "description" in node else {}
        if "anyOf" in node:
            options = [option for option in node["anyOf"] if option.get("type") != "null"]
            null = {"nullable": True} if len(options) < len(node["anyOf"]) else {}
            if len(options) == 1:
                return {**self._resolved(options[0]), **null, **description}
            return {"alternatives": [self._resolved(option) for option in options], **null, **description}
        if "$ref" in node:
            target = self._root["$defs"][node["$ref"].rpartition("/")[2]]
            return {**target, **description}
        return node


def _expected(setting: Node) -> str:
    return _words(setting) + (", or null" if setting.get("nullable") else "")


def _words(setting: Node) -> str:
    if "alternatives" in setting:
        return ", or ".join(map(_words, setting["alternatives"]))
    choices = _choices(setting)
    if choices:
        return ", ".join(choices[:-1]) + (" or " if len(choices) > 1 else "") + choices[-1]
    kind = setting.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(setting)
    if kind == "array":
        least, most = setting.get("minItems"), setting.get("maxItems")
        if least and least == most:
            return f"a list of {least} values"
        return f"a list of at least {least} value{'s' * (least > 1)}" if least else "a list"
    if kind == "object":
        return "a group of settings (lines of `key: value`)"
    if setting.get("format") == "path":
        return "a path (text; quote it if it looks like something else)"
    words = {"boolean": "true or false", "string": "text (quote it if it looks like something else)"}
    return words.get(str(kind), "a value")


def _choices(setting: Node) -> list[str]:
    if "alternatives" in setting:
        return [choice for each in setting["alternatives"] for choice in _choices(each)]
    options = setting.get("enum") or ([setting["const"]] if "const" in setting else [])
    return [str(option) for option in options]


def _bounds(setting: Node) -> str:
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{word} {setting[key]:g}" for key, word in words.items() if key in setting]
    return f" {' and '.join(bounds)}" if bounds else ""


def _meaning(setting: Node) -> str:
    """The first sentence of the setting's docstring."""
    text = " ".join(setting.get("description", "").split())
    first, *_ = re.split(r"\. (?=[A-Z])", text)
    return f" - {first.rstrip('.')}" if text else ""


def _found(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST_FOUND else text[: LONGEST_FOUND - 3] + "..."
