"""What the launcher keeps in a run's folder.

RUN/STOP                  made by a person: save, stop, and end the chain of jobs
RUN/SAVE                  made by a person or the supervisor: save at the next step and go on
RUN/slurm/config.yaml     the run's config as it was launched
RUN/slurm/cluster.yaml    the cluster profile
RUN/slurm/job.sbatch      what was submitted
RUN/slurm/state.json      where the supervisor stands, replaced at every change
RUN/slurm/waiting.json    what the run waits for, overwritten in place: a full disk may be what that is
RUN/slurm/alive           touched by the supervisor all the time
RUN/slurm/events.jsonl    every attempt, restart and end, with why
RUN/slurm/jobs/JOB.log    output of a job's supervisor
RUN/slurm/evaluate.sbatch a job for each new checkpoint, if the profile asks for it
RUN/slurm/evaluations/    output of those jobs
RUN/slurm/attempts/00003/ ranks' output, heartbeats, stacks, and the order of the hosts, of one attempt
RUN/slurm/agents/JOB-1/   orders to the agents of a job's nodes, and their reports
RUN/slurm/finished        the run has reached its last step: later jobs of the chain end at once
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import DataError
from megalite.report.json_lines import Event, read_events
from megalite.slurm.storage import retry_on_disk_fault
from megalite.train.in_place import read_in_place, write_in_place
from megalite.train.signals import SAVE_FILE, STOP_FILE

ENDED = ("finished", "stopped", "gave up", "cancelled")
"""Statuses of a run whose chain of jobs is over; the events that say so are called alike, in snake_case."""

WAITING_BYTES, LONGEST_WAITING = 4096, 600
"""Of the file, and characters of what is waited for; each may take six bytes."""


@dataclass(frozen=True)
class LaunchFolder:
    """Paths of one run."""

    run_dir: Path

    @property
    def path(self) -> Path:
        return self.run_dir / "slurm"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.yaml"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @property
    def evaluation_script(self) -> Path:
        return self.path / "evaluate.sbatch"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def alive(self) -> Path:
        return self.path / "alive"

    @property
    def waiting(self) -> Path:
        return self.path / "waiting.json"

    @property
    def finished(self) -> Path:
        return self.path / "finished"

    @property
    def stop(self) -> Path:
        return self.run_dir / STOP_FILE

    @property
    def save(self) -> Path:
        return self.run_dir / SAVE_FILE

    def agents(self, job: str, generation: int) -> Path:
        """Folder in which a job's supervisor meets the agents of its nodes; they may be started again."""
        return self.path / "agents" / f"{job}-{generation}"

    def attempt(self, number: int) -> Path:
        """Folder of one attempt."""
        return self.path / "attempts" / f"{number:05d}"

    def read_state(self) -> dict[str, Any]:
        """What the supervisor wrote last; empty before the first launch.

        Raises:
            DataError: it is damaged.
        """
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise DataError(f"{self.state}: damaged; launch the run again, where no job of it is live")
        return state

    def known_state(self) -> dict[str, Any]:
        """The same, empty where it is damaged."""
        try:
            return self.read_state()
        except DataError:
            return {}

    def write_state(self, **changes: Any) -> dict[str, Any]:
        """Change some keys of the state; a reader sees the old one or the new one.

        Raises:
            DataError: the old one is damaged.
        """
        state = {**self.read_state(), **changes, "time": round(time.time(), 3)}
        self.replace_state(state)
        return state

    def replace_state(self, state: dict[str, Any]) -> None:
        """Put another state in its place; an empty one is none."""
        if not state:
            self.state.unlink(missing_ok=True)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.state.with_name(f".state-{os.getpid()}.tmp")
        partial.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.state)

    def say_waiting(self, what: str, since: float) -> None:
        """Say what the run waits for; nothing, when that is empty."""
        write_in_place(self.waiting, {"for": what[:LONGEST_WAITING], "since": round(since, 3)}, WAITING_BYTES)

    def read_waiting(self) -> dict[str, Any] | None:
        """What it waits for, and since when; None for nothing."""
        said, _ = read_in_place(self.waiting)
        return said if isinstance(said, dict) and said.get("for") else None

    def add_event(self, kind: str, **details: Any) -> None:
        """Append one event, or nothing where the disk is full. Only supervisors write here, and one of a run lives."""
        event = {"time": round(time.time(), 3), "event": kind, **details}
        size = self.events.stat().st_size if self.events.is_file() else 0
        try:
            with open(self.events, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError:
            os.truncate(self.events, size)
            raise

    def read_events(self) -> list[Event]:
        """All events, oldest first."""
        return read_events(self.events)


class EventLog:
    """What a supervisor writes down: events, the state, what it waits for, and lines for people.

    Args:
        folder: of the run.
        job: number of the batch job.
        patience_seconds: how long a note is tried again while the disk does not take it.
    """

    def __init__(self, folder: LaunchFolder, job: str, patience_seconds: float):
        self._folder, self._job, self._patience_seconds = folder, job, patience_seconds
        self._waits = False

    def event(self, kind: str, **details: object) -> None:
        """Write down an event, for programs and for people; what was waited for until then is not any more."""
        self.waits_no_more()
        retry_on_disk_fault(lambda: self._folder.add_event(kind, job=self._job, **details), self._patience_seconds)
        words = [
            time.strftime("%F %T"),
            kind.replace("_", " "),
            *(f"{name}={value}" for name, value in details.items()),
        ]
        say(" ".join(words))

    def state(self, **changes: object) -> None:
        """Write down where the run stands."""
        retry_on_disk_fault(lambda: self._folder.write_state(**changes), self._patience_seconds)

    def waits_for(self, what: str, since: float | None = None) -> None:
        """Say what the run waits for, until the next event."""
        self._waits = True
        say(f"{time.strftime('%F %T')} waiting for {what}")
        with suppress(OSError):  # the disk may be what it waits for
            self._folder.say_waiting(what, since or time.time())

    def waits_no_more(self) -> None:
        """What was waited for is there."""
        if self._waits:
            self._waits = False
            with suppress(OSError):
                self._folder.say_waiting("", time.time())


def say(text: str) -> None:
    """Print to the job's log, which may be on a disk that is full."""
    with suppress(OSError):
        print(text, flush=True)
