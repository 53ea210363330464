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
    problems = [] if problems is None else problems
    found = [event for records in read_records(path, problems) for event in records]
    events = [{**event, "event": current_kind(event["event"])} for event in found if _is_event(event)]
    if num_others := len(found) - len(events):
        said = "1 line is" if num_others == 1 else f"{num_others} lines are"
        problems.append(f"{path.name}: {said} no event as they are written, and left out")
    return events


LATEST = 253_402_300_799.0
"""Seconds at the end of the year 9999."""

LARGEST = 2**53
"""Whole numbers that JSON's readers agree on."""

MAPPINGS = ("sets", "tasks", "consumed", "software")
"""Fields of events that are objects; all but the last one of objects."""


def _is_event(event: Event) -> bool:
    """Whether a line has a time and a kind, and fields that are read have the types that they are written with."""
    seconds = (event.get(key, 0.0) for key in ("seconds", "stalled_seconds"))
    whole = (event[key] for key in ("step", "world_size") if key in event)
    has_step = "step" in event or not (event.get("event") == "validation" or "origin" in event)
    return (
        isinstance(event.get("event"), str)
        and has_step
        and all(_is_within(each, LATEST) for each in (event.get("time"), *seconds))
        and all(type(each) is int and 0 <= each < LARGEST for each in whole)
        and _is_measure(event, "loss")
        and all(_is_mapping(event[key], of_mappings=key != "software") for key in MAPPINGS if event.get(key))
        and all(_is_measure(each, "loss") for each in (event.get("sets") or {}).values())
        and all(_is_measure(each, "acc", needed=True) for each in (event.get("tasks") or {}).values())
        and all(type(each.get("tokens", 0)) is int for each in (event.get("consumed") or {}).values())
    )


def _is_within(value: object, most: float) -> bool:
    return type(value) in (int, float) and 0.0 <= value <= most  # type: ignore[operator]


def _is_measure(record: Record, key: str, *, needed: bool = False) -> bool:
    """A number, which may be none where training has gone wrong, or nothing."""
    return type(record.get(key)) in ((int, float) if needed else (int, float, type(None)))


def _is_mapping(value: object, *, of_mappings: bool) -> bool:
    return isinstance(value, dict) and not (of_mappings and any(type(each) is not dict for each in value.values()))


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
