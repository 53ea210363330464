"""What a run folder holds, as a report needs it: read while the run goes on, and after whatever ended it.

A line cut off by a crash, a file that is not there yet and a key that an older version did not write are all normal.
What could not be read is said in the report; only a folder without a single step is refused.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from megalite.errors import UserError

METRICS, EVENTS, CONFIG, PLAN = "metrics.jsonl", "events.jsonl", "config.yaml", "plan.json"
LAYERS = "layers.jsonl"
"""In a run folder; `train.run_folder` says what they are."""

LAUNCHER_EVENTS = Path("slurm/events.jsonl")
"""Of a run under `megalite launch`."""

NAN = float("nan")

Event = dict[str, Any]


@dataclass(frozen=True)
class RunData:
    """One run."""

    name: str
    folder: Path
    config: dict[str, Any]
    """As resolved; empty when it could not be read."""
    plan: dict[str, Any]
    columns: dict[str, np.ndarray]
    """Each number of metrics.jsonl, float64 [steps], NaN where a step has none. `step`, `tokens` and `hours` are there
    always and rise."""
    events: tuple[Event, ...]
    looks: tuple[dict[str, Any], ...]
    """Looks into the layers: a step, and under `layers` the statistics of each by its name."""
    launched: float | None
    """When `megalite launch` took it on, in seconds since 1970; None for a run without a launcher."""
    problems: tuple[str, ...]
    """What could not be read."""

    @property
    def last_step(self) -> int:
        """The newest step with metrics."""
        return int(self.columns["step"][-1])

    @property
    def total_steps(self) -> int | None:
        """Steps that the run was to take."""
        return self.plan.get("total_steps")

    def of_kind(self, kind: str) -> list[Event]:
        """Its events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def read_runs(folders: Iterable[Path]) -> list[RunData]:
    """Read runs and give each a name of its own.

    Raises:
        UserError: a folder is not there, is no run's, or has no step yet.
    """
    folders = list(folders)
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _read(folder: Path, name: str) -> RunData:
    _refuse(folder)
    problems: list[str] = []
    columns = _columns(_lines(folder / METRICS, problems))
    if not columns:
        raise UserError(f"{folder}: {METRICS} holds no step yet; wait for the run's first step, or look into logs/")
    launched = (event for event in _lines(folder / LAUNCHER_EVENTS, []) if event.get("event") == "launched")
    events = [event for event in _lines(folder / EVENTS, problems) if "event" in event and "time" in event]
    return RunData(
        name=name,
        folder=folder,
        config=_mapping(folder / CONFIG, yaml.safe_load, problems),
        plan=_mapping(folder / PLAN, json.loads, problems),
        columns=columns,
        looks=tuple(look for look in _looks(folder, problems) if isinstance(look.get("layers"), dict)),
        events=tuple(sorted(events, key=lambda event: event["time"])),
        launched=next((event.get("time") for event in launched), None),
        problems=tuple(problems),
    )


def _refuse(folder: Path) -> None:
    """Raise the right complaint about a folder without steps."""
    advice = "give the folder that run.dir names, the one with metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {advice}")
    if not (folder / METRICS).is_file():
        if (folder / CONFIG).is_file():
            raise UserError(f"{folder}: the run has no {METRICS} yet; wait for its first step, or look into logs/")
        below = [path.parent.name for path in sorted(folder.glob(f"*/{METRICS}"))]
        runs = f"; there are runs in it: {', '.join(below[:8])}" if below else ""
        raise UserError(f"{folder}: not a run's folder (there is no {METRICS}){runs}; {advice}")


def _lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file; lines that are none are counted, not raised."""
    num_wrong = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                record = _parse(line)
                if isinstance(record, dict):
                    yield record
                else:
                    num_wrong += 1
    except OSError as error:
        problems.append(f"{path.name}: {'not there' if not path.exists() else f'cannot be read ({error})'}")
    if num_wrong:
        lines = "1 line" if num_wrong == 1 else f"{num_wrong} lines"
        problems.append(f"{path.name}: {lines} left out, cut off or damaged")


def _looks(folder: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    return _lines(folder / LAYERS, problems) if (folder / LAYERS).is_file() else iter(())


def _parse(line: bytes) -> Any:
    """What a line holds, also with the NaN and Infinity that JSON proper does not have; None for nothing at all."""
    try:
        return orjson.loads(line) if line.strip() else {}
    except orjson.JSONDecodeError:
        try:
            return json.loads(line)
        except ValueError:
            return None


def _mapping(path: Path, parse: Any, problems: list[str]) -> dict[str, Any]:
    try:
        found = parse(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        problems.append(f"{path.name}: damaged")
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name}: {'not there' if not path.exists() else f'cannot be read ({error})'}")
    return {}


def _columns(records: Iterable[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The numbers of each key by rising step; a step that was done again counts as the last attempt did it.

    Eight bytes a number: a million steps are some ten megabytes a key, in the process that has just trained.
    """
    found: dict[str, array] = {}
    places: dict[int, int] = {}
    for record in records:
        if not isinstance(record.get("step"), int):
            continue
        place = places.setdefault(record["step"], len(places))
        for key, value in record.items():
            if isinstance(value, int | float):
                column = found.setdefault(key, array("d"))
                column.extend([NAN] * (place + 1 - len(column)))
                column[place] = value
    for column in found.values():
        column.extend([NAN] * (len(places) - len(column)))
    order = np.argsort(found["step"]) if places else []
    columns = {key: np.array(column)[order] for key, column in found.items()}
    if places:
        columns["tokens"] = np.fmax.accumulate(np.nan_to_num(columns.get("tokens", columns["step"])))
        columns["hours"] = np.cumsum(np.nan_to_num(columns.get("seconds", np.zeros(len(places))))) / 3600
    return columns


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, with as many parts before it as it takes to tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    length = 1
    while length < max(map(len, parts)) and len({each[-length:] for each in parts}) < len(set(parts)):
        length += 1
    names = [os.path.join(*each[-length:]) for each in parts]
    return [f"{name} ({names[:n].count(name) + 1})" if name in names[:n] else name for n, name in enumerate(names)]
