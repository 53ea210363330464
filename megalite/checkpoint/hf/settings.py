"""The keys of a config.json as a closed world: each is asked for, known to be harmless, or refused by name.

transformers keeps whatever key it finds, and its code may look for any of them, so a key that megalite has not
understood may change what the model computes. Whoever reads takes keys one by one; what nobody took is a problem.
Values are held to their JSON kind, because `true` is not 1 and "48" is not 48 to transformers either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megalite.section import LARGEST_NUMBER

REQUIRED = object()
"""Default of a key that a folder must have."""

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a group", list: "a list"}


@dataclass(frozen=True)
class Key:
    """A key of config.json that has the same meaning as a field of ours."""

    name: str
    kind: type = int
    default: Any = REQUIRED
    """What the class takes where the key is left out."""
    nullable: bool = False
    """Whether null is a value: what it stands for follows from other keys, here as there."""
    has_point: bool = False
    """Whether transformers refuses a whole number where another one may stand."""


class Settings:
    """A group of settings that notes which of them were asked for.

    Args:
        raw: as parsed from JSON.
        problems: gets a sentence for each thing that megalite does not have.
        name: of the group, for messages; empty for the file itself.
    """

    def __init__(self, raw: dict[str, Any], problems: list[str], name: str = ""):
        self.problems = problems
        self._raw, self._name = raw, name
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether a key is there, and not null."""
        return self._raw.get(key) is not None

    def holds_groups(self) -> bool:
        """Whether there are groups within this one."""
        return any(isinstance(value, dict) for value in self._raw.values())

    def take(self, key: Key) -> Any:
        """A key's value, or its default; None, with a problem, where it is missing or of another kind."""
        self._asked.add(key.name)
        value = self._raw.get(key.name, key.default)
        if value is REQUIRED:
            self.complain(key.name, "missing")
            return None
        if value is None and (key.nullable or key.name not in self._raw):
            return None
        if key.has_point and isinstance(value, int) and not isinstance(value, bool):
            self.complain(key.name, f"found {value}, transformers wants it as {float(value)}")
            return None
        if not _is(value, key.kind):
            self.complain(key.name, f"found {_short(value)}, expected {KINDS[key.kind]}")
            return None
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:
            self.complain(key.name, f"found {_short(value)}, no key means anything beyond 2^63")
            return None
        return value

    def expect(self, key: str, default: Any, *allowed: Any) -> Any:
        """A key's value, with a problem when it is none of those that megalite has."""
        self._asked.add(key)
        found = self._raw.get(key, default)
        if not any(found == value and type(found) is type(value) for value in allowed):
            self.complain(key, f"found {_short(found)}, megalite has only {' or '.join(map(_short, allowed))}")
        return found

    def group(self, key: str) -> Settings | None:
        """A group within this one; None where it is missing, null or empty, or, with a problem, no group."""
        value = self.take(Key(key, dict, None, nullable=True))
        return Settings(value, self.problems, self._path(key)) if value else None

    def ignore(self, keys: Iterable[str]) -> None:
        """Take keys that change nothing of what the model computes."""
        self._asked.update(keys)

    def refuse_unknown(self) -> None:
        """A problem for every key that nobody asked for."""
        for key in self._raw.keys() - self._asked:
            self.complain(
                key,
                f"found {_short(self._raw[key])}, a key that megalite does not know and that may change what the model "
                "computes; if you know that it does not, delete it",
            )

    def is_at(self, name: str) -> bool:
        """Whether this is a group of that name, or within one."""
        return self._name.split(".")[0] == name

    def complain(self, key: str, sentence: str) -> None:
        """Add a problem with a key, once."""
        problem = f"{self._path(key)}: {sentence}"
        if problem not in self.problems:
            self.problems.append(problem)

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _short(value: Any, longest: int = 60) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."
