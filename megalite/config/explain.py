"""Pydantic's complaints as sentences for the user: what was found, what was expected, what to do.

What a setting expects is read from the JSON schema that pydantic makes of `Config`, so no wording is kept beside the
schema that could come to differ from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megalite.config.schema import Config
from megalite.errors import did_you_mean

Node = dict[str, Any]
"""A node of the JSON schema."""

LONGEST_FOUND = 60
"""Characters of a wrong value that a message shows."""


def explain(error: ValidationError) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield, for each complaint, the keys that lead to the setting and a sentence about it."""
    for details in error.errors():
        yield tuple(str(key) for key in details["loc"]), _sentence(details)


def _sentence(details: ErrorDetails) -> str:
    keys = details["loc"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(keys)
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    setting = _setting(keys)
    if setting is None:
        return f"found {_found(details['input'])}: {details['msg']}"
    expected = f"expected {_expected(setting)}{_meaning(setting)}"
    if details["type"] == "missing":
        return f"missing; {expected}"
    hint = did_you_mean(details["input"], _choices(setting)) if isinstance(details["input"], str) else ""
    return f"found {_found(details['input'])}{hint}, {expected}"


def _unknown_key(keys: tuple[int | str, ...]) -> str:
    """Suggest a key of the same section that reads alike, else one of another section."""
    name = str(keys[-1])
    siblings = (_setting(keys[:-1]) or {}).get("properties", {})
    hint = did_you_mean(name, siblings)
    if not hint:
        elsewhere = _settings_by_name()
        near = [name] if name in elsewhere else [key for key in elsewhere if did_you_mean(name, [key])]
        options = [option for key in near for option in elsewhere[key]]
        hint = f" (did you mean {' or '.join(options)}?)" if 0 < len(options) <= 3 else ""
    if not hint:
        hint = f"; known here: {', '.join(siblings)}" if siblings else "; there are no settings here"
    return f"unknown key{hint}"


@cache
def _schema() -> Node:
    return Config.model_json_schema()


@cache
def _settings_by_name() -> dict[str, list[str]]:
    """Dotted names of all settings, by their last part."""
    names: dict[str, list[str]] = {}

    def collect(node: Node, prefix: tuple[str, ...]) -> None:
        for key, child in node.get("properties", {}).items():
            inner = _resolved(child)
            if "properties" in inner:
                collect(inner, (*prefix, key))
            else:
                names.setdefault(key, []).append(".".join((*prefix, key)))

    collect(_schema(), ())
    return names


def _setting(keys: tuple[int | str, ...]) -> Node | None:
    """The schema of the setting that keys lead to; None for one that the schema leaves open."""
    node: Node | None = _schema()
    for key in keys:
        node = _resolved(node)
        if isinstance(key, int):
            prefix = node.get("prefixItems", [])
            node = prefix[key] if key < len(prefix) else node.get("items")
        else:
            node = node.get("properties", {}).get(key)
        if node is None:
            return None
    return _resolved(node)


def _resolved(node: Node) -> Node:
    """A node without references and without its null alternative, which is noted as `nullable`."""
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        return {**node, **_resolved(options[0]), "nullable": True, **_description(node)}
    if "$ref" in node:
        target = _schema()["$defs"][node["$ref"].rpartition("/")[2]]
        return {**_resolved(target), **_description(node)}
    return node


def _description(node: Node) -> Node:
    return {"description": node["description"]} if "description" in node else {}


def _expected(setting: Node) -> str:
    return _words(setting) + (", or null" if setting.get("nullable") else "")


def _words(setting: Node) -> str:
    choices = _choices(setting)
    if choices:
        return ", ".join(choices[:-1]) + (" or " if len(choices) > 1 else "") + choices[-1]
    kind = setting.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(setting)
    if kind == "array":
        length = setting.get("minItems")
        return f"a list of {length} values" if length else "a list"
    if kind == "object":
        return "a group of settings (lines of `key: value`)"
    if setting.get("format") == "path":
        return "a path (text; quote it if it looks like something else)"
    return {"boolean": "true or false", "string": "text (quote it if it looks like something else)"}[kind]


def _choices(setting: Node) -> list[str]:
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
    """The first sentence of the setting's docstring, in parentheses."""
    text = " ".join(setting.get("description", "").split())
    return f" ({text.split('. ')[0].rstrip('.')})" if text else ""


def _found(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST_FOUND else text[: LONGEST_FOUND - 3] + "..."
