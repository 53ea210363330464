"""What a run writes down: one JSON object a line.

`metrics.jsonl` has one object a step, `events.jsonl` one for everything out of the ordinary. After a crash a run goes
on from its last checkpoint, so the lines of steps that will be done again are dropped first.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from megalite.files import write_atomically
from megalite.step_lines import parse_step_line

STEP_KEYS = frozenset(
    (
        *("step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "tokens_per_second", "mfu", "skipped"),
        *("seconds", "memory_bytes"),
    )
)
"""What every line of metrics.jsonl has."""

READERS_KEYS = frozenset(("hours", "validation"))
"""What reports and sweeps call numbers of their own making."""

READERS_PREFIXES = ("validation/", "task/")
"""How the names of a sweep's metrics begin that are no numbers of a step."""


def whose_name(name: str) -> str | None:
    """What has a number of some name already, so that a step's figure cannot be called so; None for nothing."""
    if name in STEP_KEYS:
        return "every line of metrics.jsonl has"
    is_readers = name in READERS_KEYS or name.startswith(READERS_PREFIXES)
    return "reports and sweeps have" if is_readers else None


class JsonLines:
    """A file of JSON objects that is appended to and always ends in a whole line."""

    def __init__(self, path: Path):
        self.path = path
        drop_cut_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for the whole run)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(without_nonfinite(record), allow_nan=False) + "\n")
        self._file.flush()

    def drop_after(self, step: int) -> None:
        """Remove the lines of later steps."""
        self._file.close()
        drop_steps_after(self.path, step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


class Events(JsonLines):
    """The log of events; each carries the time, the step and why."""

    def add(self, event: str, step: int, **details: Any) -> None:
        self.write({"time": round(time.time(), 3), "event": event, "step": step, **details})


def last_event(path: Path, event: str) -> dict[str, Any]:
    """The last event of a kind that was written down; empty where there is none."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    found = (parse_step_line(line) for line in reversed(lines) if f'"event": "{event}"'.encode() in line)
    return next((record for record in found if record is not None and record.get("event") == event), {})


def without_nonfinite(value: Any) -> Any:
    """The same, with null for NaN and infinities, which JSON has not: other programs could not read the line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nonfinite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(each) for each in value]
    return value


def drop_cut_line(path: Path) -> None:
    """Remove what stands after the last whole line: a crash, or a full disk, cut it short."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def drop_steps_after(path: Path, step: int) -> int:
    """Remove the lines of later steps, a line cut short by a crash and what is no record. Returns how many went.

    The file is a new one in any case: a stale attempt that still holds the old one writes into nothing.
    """
    if not path.is_file():
        return 0
    kept, dropped = [], 0
    for line in path.read_bytes().removesuffix(b"\n").split(b"\n"):
        record = parse_step_line(line)
        if record is not None and record["step"] <= step:
            kept.append(line.decode("utf-8"))
        else:
            dropped += bool(line)
    write_atomically(path, "".join(f"{line}\n" for line in kept))
    return dropped
