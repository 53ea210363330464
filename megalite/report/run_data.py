"""What a run folder holds, as a report needs it: read while the run goes on, and after whatever ended it.

A line cut off by a crash, a file that is not there yet and a key that an older version did not write are all normal.
What could not be read is said in the report; only a folder without a single step is refused.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megalite.errors import UserError
from megalite.report.columns import columns_of
from megalite.report.json_lines import Event, Record, read_events, read_records
from megalite.report.shapes import are_layer_stats, are_loads, is_config, is_plan
from megalite.report.spikes import Spike, find_spikes

METRICS, EVENTS, CONFIG, PLAN = "metrics.jsonl", "events.jsonl", "config.yaml", "plan.json"
LAYERS, EXPERTS = "layers.jsonl", "experts.jsonl"
"""In a run folder; `train.run_folder` says what they are."""

LAUNCHER_EVENTS = Path("slurm/events.jsonl")
"""Of a run under `megalite launch`."""


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
    layer_stats: tuple[dict[str, Any], ...]
    """Statistics of the layers now and then: a step, and under `layers` the statistics of each by its name."""
    expert_loads: tuple[dict[str, Any], ...]
    """How many tokens each expert had now and then: a step, and under `loads` a list by block."""
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

    @cached_property
    def spikes(self) -> list[Spike]:
        """Steps whose loss stands out."""
        return find_spikes(self.columns.get("loss", np.empty(0)))

    def of_kind(self, kind: str) -> list[Event]:
        """Its events of one kind."""
        return [event for event in self.events if event["event"] == kind]


def read_runs(folders: Iterable[Path], told: Callable[[int], None] | None = None) -> list[RunData]:
    """Read runs and give each a name of its own.

    Args:
        folders: of the runs.
        told: called with the number of bytes whenever some of their metrics have been read.

    Raises:
        UserError: a folder is not there, is no run's, or has no step yet.
    """
    folders = list(folders)
    for folder in folders:
        _refuse(folder)
    return [_read(folder, name, told) for folder, name in zip(folders, _names(folders), strict=True)]


def _read(folder: Path, name: str, told: Callable[[int], None] | None) -> RunData:
    problems: list[str] = []
    columns = columns_of(read_records(folder / METRICS, problems, told))
    if not columns:
        raise UserError(f"{folder}: {METRICS} holds no step yet; wait for the run's first step, or look into logs/")
    launched = (event for event in read_events(folder / LAUNCHER_EVENTS) if event["event"] == "launched")
    events = read_events(folder / EVENTS, problems)
    return RunData(
        name=name,
        folder=folder,
        config=_mapping(folder / CONFIG, yaml.safe_load, is_config, problems),
        plan=_mapping(folder / PLAN, json.loads, is_plan, problems),
        columns=columns,
        layer_stats=_records(folder / LAYERS, are_layer_stats, problems),
        expert_loads=_records(folder / EXPERTS, are_loads, problems),
        events=tuple(sorted(events, key=lambda event: event["time"])),
        launched=next((event["time"] for event in launched), None),
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


def _lines(path: Path, problems: list[str]) -> Iterator[Record]:
    """The objects of a jsonl file one by one."""
    return itertools.chain.from_iterable(read_records(path, problems))


def _records(path: Path, is_ours: Callable[[Record], bool], problems: list[str]) -> tuple[Record, ...]:
    """The lines of a file that not every run has; others are counted among the problems."""
    if not path.is_file():
        return ()
    found = list(_lines(path, problems))
    kept = tuple(record for record in found if is_ours(record))
    if num_others := len(found) - len(kept):
        said = "1 line is" if num_others == 1 else f"{num_others} lines are"
        problems.append(f"{path.name}: {said} not as they are written, and left out")
    return kept


def _mapping(path: Path, parse: Any, is_ours: Callable[[Record], bool], problems: list[str]) -> dict[str, Any]:
    try:
        found = parse(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and is_ours(found):
            return found
        problems.append(f"{path.name}: damaged")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"{path.name}: {'not there' if not path.exists() else f'cannot be read ({error})'}")
    return {}


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, with as many parts before it as it takes to tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    length = 1
    while length < max(map(len, parts)) and len({each[-length:] for each in parts}) < len(set(parts)):
        length += 1
    names = [os.path.join(*each[-length:]) for each in parts]
    return [f"{name} ({names[:n].count(name) + 1})" if name in names[:n] else name for n, name in enumerate(names)]


@dataclass(frozen=True)
class TimeUse:
    """Seconds of a run, from what every run writes down; `slurm.goodput` tells the attempts of a launched run apart."""

    total: float
    """From the launch, or the first start, to the last sign of life."""
    steps: float
    """Those that count, added up: steps done again are in metrics.jsonl once."""
    validating: float
    saving: float
    """In which the loop stood still for a checkpoint."""

    @property
    def other(self) -> float:
        """What is left: starting, waiting for nodes, steps that a later attempt did again."""
        return max(0.0, self.total - self.steps - self.validating - self.saving)

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that count."""
        return self.steps / self.total if self.total else 0.0


def time_use(run: RunData) -> TimeUse:
    """Account for a run's time."""
    steps, seconds = run.columns["step"], np.nan_to_num(run.columns.get("seconds", np.zeros(1)))
    computing = float(seconds.sum())
    validating = sum(event.get("seconds", 0.0) for event in run.of_kind("validation"))
    saving = sum(event.get("stalled_seconds", 0.0) for event in run.of_kind("save"))
    least = computing + validating + saving
    if not run.events:
        return TimeUse(least, computing, validating, saving)
    first, last = run.events[0]["time"], run.events[-1]["time"]
    if run.launched is not None:
        first = min(first, run.launched)
    since = seconds[steps > run.events[-1].get("step", 0)].sum() if run.events[-1]["event"] != "done" else 0.0
    return TimeUse(max(last + float(since) - first, least), computing, validating, saving)
