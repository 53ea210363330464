"""Files of JSON objects, a line each, as fast as they can be parsed: whole stretches at once, line by line where one of
them is damaged.

A line that a crash cut off, and a NaN that JSON proper does not have, are normal here; neither costs the others.

Events are read here for whoever wants them, under the kinds that are written today.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

STRETCH_BYTES = 1 << 20
"""Read and parsed at once."""

Record = dict[str, Any]

Event = dict[str, Any]
"""A line of events.jsonl: `time`, its kind under `event`, and what belongs to it."""


def read_records(path: Path, problems: list[str], told: Callable[[int], None] | None = None) -> Iterator[list[Record]]:
    """The objects of a file, a stretch at a time.

    Args:
        path: the file.
        problems: what could not be read is added here; lines that are no objects are counted.
        told: called with the number of bytes after each stretch.
    """
    num_wrong = 0
    try:
        with open(path, "rb") as file:
            while stretch := file.read(STRETCH_BYTES):
                stretch += file.readline()
                records, wrong = _parse(stretch)
                num_wrong += wrong
                if told is not None:
                    told(len(stretch))
                yield records
    except OSError as error:
        problems.append(f"{path.name}: {'not there' if not path.exists() else f'cannot be read ({error})'}")
    if num_wrong:
        said = "1 line" if num_wrong == 1 else f"{num_wrong} lines"
        problems.append(f"{path.name}: {said} left out, cut off or damaged")


def read_events(path: Path, problems: list[str] | None = None) -> list[Event]:
    """The events of a file, in the order of their lines.

    Args:
        path: the file; one that is not there has none.
        problems: what could not be read is added here; None where nobody wants to know.
    """
    found = (event for records in read_records(path, [] if problems is None else problems) for event in records)
    return [{**event, "event": current_kind(event["event"])} for event in found if "time" in event and "event" in event]


def current_kind(kind: object) -> str:
    """The kind of an event as it is written today: older runs have some with spaces (`save started`)."""
    return str(kind).replace(" ", "_")


def _parse(stretch: bytes) -> tuple[list[Record], int]:
    """The objects of whole lines, and how many lines are none."""
    lines = stretch.rstrip()
    try:
        found = orjson.loads(b"[" + lines.replace(b"\n", b",") + b"]")
        if len(found) != lines.count(b"\n") + 1:  # two objects in one line
            raise ValueError
    except ValueError:
        found = [_parse_line(line) for line in lines.split(b"\n") if line.strip()]
    records = [record for record in found if type(record) is dict]
    return records, len(found) - len(records)


def _parse_line(line: bytes) -> Any:
    """What a line holds, also NaN and Infinity; None for nothing at all."""
    try:
        return orjson.loads(line)
    except ValueError:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None
