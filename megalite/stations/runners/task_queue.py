"""A folder where a driver and its workers meet: the one says what is to do, the others take it task by task.

    HOME/
      order.json           driver: the turn at hand (a station's folder and phase), or that all is over
      turns/ID/tasks.json  driver: the numbers of its tasks
      turns/ID/00017       worker: task 17 is mine. Made exclusively, so that one worker alone can
      errors/ID-00017      worker: why it could not be done
      workers/NAME         worker: a sign of life every few seconds, and where its output goes

Only files are shared, so any disk that all nodes see will do, and nothing listens on a port. Clocks are never compared.
Claims keep work from being done twice; they do not make it right: a task leaves the same bytes whoever does it, so
a worker that is taken for dead and lives does no harm.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.stations.tasks import replacing


@dataclass(frozen=True)
class QueueState:
    """What workers are to do now."""

    turn: str = ""
    """Names the tasks at hand; empty while there are none."""
    folder: str = ""
    """Of the station."""
    phase: str = ""
    again: tuple[int, ...] = ()
    """Tasks given out once more, because who had claimed them is gone. It only grows during a turn."""
    closed: bool = False
    """Nothing will follow."""


@dataclass(frozen=True)
class TaskFailure:
    """A task that raised an error."""

    number: int
    kind: str
    """`data` or `user`: a mistake of the user's, in the data or elsewhere; `disk full`; `fault`: anything else."""
    message: str
    """What the error says, or its traceback if it is a fault."""
    worker: str


@dataclass(frozen=True)
class WorkerHeartbeat:
    """A worker's sign of life."""

    host: str
    log: str
    beat: int
    """Counts up."""


class TaskQueue:
    """Both sides' view of the folder.

    Args:
        home: the folder.
    """

    def __init__(self, home: Path):
        self._home = home
        self._state = QueueState()

    # The driver's side

    def clear(self) -> None:
        """Begin anew: nothing is to do, and earlier turns are forgotten."""
        for name in ("turns", "errors", "workers"):
            shutil.rmtree(self._home / name, ignore_errors=True)
            (self._home / name).mkdir(parents=True, exist_ok=True)
        self._write(QueueState())

    def post(self, folder: Path, phase: str, numbers: Sequence[int]) -> None:
        """Begin a turn."""
        state = QueueState(uuid.uuid4().hex[:12], str(folder.absolute()), phase)
        _write_json(self._turn(state) / "tasks.json", list(numbers))
        self._write(state)

    def withdraw(self, *, closed: bool = False) -> None:
        """End the turn: workers finish the task at hand and take no further one; if `closed`, they leave."""
        self._write(QueueState(closed=closed))

    def offer_again(self, number: int) -> None:
        """Give out a task whose worker is gone."""
        (self._turn(self._state) / _name(number)).unlink(missing_ok=True)
        self._write(QueueState(**{**asdict(self._state), "again": (*self._state.again, number)}))

    def claims(self, numbers: Iterable[int]) -> dict[int, str]:
        """Who has claimed which of these tasks; an empty name in the moment before the worker has written it."""
        claimed = self.claimed(self._state)
        paths = {number: self._turn(self._state) / _name(number) for number in numbers if number in claimed}
        return {number: path.read_text(encoding="utf-8") for number, path in paths.items()}

    def failures(self) -> list[TaskFailure]:
        """Errors of this turn, each told once."""
        found = []
        for path in sorted((self._home / "errors").glob(f"{self._state.turn}-*")):
            found.append(TaskFailure(**json.loads(path.read_text(encoding="utf-8"))))
            path.unlink()
        return found

    def heartbeat(self, worker: str) -> WorkerHeartbeat | None:
        """A worker's last sign of life."""
        try:
            return WorkerHeartbeat(**json.loads((self._home / "workers" / worker).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    # The workers' side

    def state(self) -> QueueState:
        """What is to do. A folder that is gone is a closed one."""
        try:
            plain = json.loads((self._home / "order.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return QueueState(closed=True)
        return QueueState(**{**plain, "again": tuple(plain["again"])})

    def tasks(self, state: QueueState) -> list[int]:
        """All tasks of a turn."""
        return json.loads((self._turn(state) / "tasks.json").read_text(encoding="utf-8"))

    def claimed(self, state: QueueState) -> set[int]:
        """The tasks of a turn that somebody has claimed."""
        return {int(name) for name in os.listdir(self._turn(state)) if name.isdecimal()}

    def claim(self, state: QueueState, number: int, worker: str) -> bool:
        """Try to make a task one's own."""
        try:
            with open(self._turn(state) / _name(number), "x", encoding="utf-8") as file:
                file.write(worker)
        except FileExistsError:
            return False
        return True

    def fail(self, state: QueueState, failure: TaskFailure) -> None:
        """Say that a task cannot be done."""
        _write_json(self._home / "errors" / f"{state.turn}-{_name(failure.number)}", asdict(failure))

    def beat(self, worker: str, heartbeat: WorkerHeartbeat) -> None:
        """Show that a worker lives."""
        _write_json(self._home / "workers" / worker, asdict(heartbeat))

    def _turn(self, state: QueueState) -> Path:
        return self._home / "turns" / state.turn

    def _write(self, state: QueueState) -> None:
        self._state = state
        _write_json(self._home / "order.json", asdict(state))


def _name(number: int) -> str:
    return f"{number:05d}"


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(value), encoding="utf-8")
