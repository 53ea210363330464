"""Lines of a run's files, one JSON object of a step each, read as a crash or a bad disk may have left them.

What is no such object has nothing to tell, whoever reads: half a line, zeros, bytes that are no UTF-8, a step that is
no whole number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse_step_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None where it is none, or has no step."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def read_step_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; a file that is not there, or cannot be read, has none."""
    try:
        with open(path, "rb") as file:
            yield from filter(None, map(parse_step_line, file))
    except OSError:
        return


def is_finite_number(value: object) -> bool:
    """Whether a measure is one that can be computed with."""
    try:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond floating point
        return False
