"""Prompts from a file: one a line, or objects of JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import DataError

KEYS = ("prompt", "id")


@dataclass(frozen=True)
class Prompt:
    """What a text begins with."""

    text: str
    id: str | int | None = None
    """The file's own name for it, which goes along."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: of `.jsonl` an object a line with `prompt`, and `id` if it has one; else each line is one.

    Raises:
        DataError: it cannot be read, or a line is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"{path}: cannot be read as prompts: {why}") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise DataError(f"{path}: no prompts; write one a line")
    return [_read(path, number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]


def _read(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}:{number}"
    if not line.strip():
        raise DataError(f'{where}: the line is empty; leave it out (an empty prompt is {{"prompt": ""}} in a .jsonl)')
    if path.suffix != ".jsonl":
        return Prompt(line)
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise DataError(f'{where}: expected an object with a text under "prompt", found {line[:60]}')
    if unknown := record.keys() - set(KEYS):
        raise DataError(f"{where}: unknown key {min(unknown)!r}; expected {' and '.join(KEYS)}")
    name = record.get("id")
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise DataError(f"{where}: id must be a text or a whole number, found {name!r}")
    try:
        record["prompt"].encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: no text: {error}") from error
    return Prompt(record["prompt"], name)
