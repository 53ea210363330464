"""Where the time of a run went: computing, starting, saving, lost to failures, waiting for nodes.

    attempt     |-- starting --|-- computing ---------- save -- computing --|x         the last checkpoint is at `save`:
                                                             |--- lost ---|             what came after is done again

From three files that a run leaves anyway: the supervisor's events, the run's events, and its steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.slurm.folder import LaunchFolder
from megalite.train.run_folder import EVENTS

Event = dict[str, Any]


@dataclass(frozen=True)
class AttemptTime:
    """Seconds of one attempt."""

    attempt: int
    job: str
    num_nodes: int
    total: float
    starting: float
    saving: float
    """In which the loop stood still for a save."""
    lost: float
    """Steps that a later attempt did again."""
    first_step: int
    last_step: int
    why: str
    """How it ended; empty while it runs."""

    @property
    def computing(self) -> float:
        """On steps that count."""
        return max(0.0, self.total - self.starting - self.saving - self.lost)


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run since it was launched."""

    attempts: tuple[AttemptTime, ...]
    total: float

    @property
    def waiting(self) -> float:
        """Without an attempt: in the queue, checking nodes, between two jobs."""
        return max(0.0, self.total - sum(attempt.total for attempt in self.attempts))

    @property
    def share(self) -> float:
        """Of all time, that spent on steps that count."""
        return sum(attempt.computing for attempt in self.attempts) / self.total if self.total else 0.0


def measure(folder: LaunchFolder, now: float) -> Goodput:
    """Account for a run's time.

    Args:
        folder: of the run.
        now: for an attempt that still runs.
    """
    own, run = folder.read_events(), _read(folder.run_dir / EVENTS)
    launched = next((event["time"] for event in own if event["event"] == "launched"), now)
    begun = [event for event in own if event["event"] == "attempt"]
    ends = {event["attempt"]: event for event in own if event["event"] == "end"}
    starts = {event.get("attempt"): event for event in run if event["event"] == "start"}
    attempts = []
    for place, begin in enumerate(begun):
        later = [starts[each["attempt"]] for each in begun[place + 1 :] if each["attempt"] in starts]
        resumed = later[0]["step"] if later else None
        following = next(
            (event["time"] for event in own if event["time"] > begin["time"] and event["event"] == "job"), now
        )
        end = ends.get(
            begin["attempt"], {"time": following, "why": "its supervisor ended first"} if following < now else None
        )
        attempts.append(_account(begin, end, starts.get(begin["attempt"]), resumed, run, now))
    is_over = bool(own) and own[-1]["event"] in ("finished", "stopped", "gave up", "cancelled")
    return Goodput(tuple(attempts), (own[-1]["time"] if is_over else now) - launched)


def _account(
    begin: Event, end: Event | None, start: Event | None, resumed: int | None, run: Sequence[Event], now: float
) -> AttemptTime:
    """The seconds of an attempt; `resumed` is the step from which the next one went on."""
    stop = end["time"] if end else now
    working = start["time"] if start and start["time"] <= stop else stop
    inside = [event for event in run if working <= event["time"] <= stop]
    saving = sum(
        event.get("stalled_seconds", event.get("seconds", 0.0)) for event in inside if event["event"] == "save"
    )
    first = start["step"] if start else 0
    last = max([first, *(event["step"] for event in inside)])
    last = max(last, end.get("last_step", 0)) if end else last
    steps_lost = max(0, last - resumed) if resumed is not None else 0
    at_work = max(0.0, stop - working - saving)
    lost = at_work * steps_lost / (last - first) if last > first else 0.0
    why = end["why"] if end else ""
    nodes = len(begin["nodes"])
    total = stop - begin["time"]
    return AttemptTime(
        begin["attempt"], begin["job"], nodes, total, working - begin["time"], saving, lost, first, last, why
    )


def _read(path: Path) -> list[Event]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
