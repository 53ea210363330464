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
class Order:
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
class Failure:
    """A task that raised an error."""

    number: int
    kind: str
    """`data` or `user`: a mistake of the user's, in the data or elsewhere; `disk full`; `fault`: anything else."""
    message: str
    """What the error says, or its traceback if it is a fault."""
    worker: str


@dataclass(frozen=True)
class Sign:
    """A worker's sign of life."""

    host: str
    log: str
    beat: int
    """Counts up."""


class Board:
    """Both sides' view of the folder.

    Args:
        home: the folder.
    """

    def __init__(self, home: Path):
        self._home = home
        self._order = Order()

    # The driver's side

    def clear(self) -> None:
        """Begin anew: nothing is to do, and earlier turns are forgotten."""
        for name in ("turns", "errors", "workers"):
            shutil.rmtree(self._home / name, ignore_errors=True)
            (self._home / name).mkdir(parents=True, exist_ok=True)
        self._write(Order())

    def post(self, folder: Path, phase: str, numbers: Sequence[int]) -> None:
        """Begin a turn."""
        order = Order(uuid.uuid4().hex[:12], str(folder.absolute()), phase)
        _write_json(self._turn(order) / "tasks.json", list(numbers))
        self._write(order)

    def withdraw(self, *, closed: bool = False) -> None:
        """End the turn: workers finish the task at hand and take no further one; if `closed`, they leave."""
        self._write(Order(closed=closed))

    def offer_again(self, number: int) -> None:
        """Give out a task whose worker is gone."""
        (self._turn(self._order) / _name(number)).unlink(missing_ok=True)
        self._write(Order(**{**asdict(self._order), "again": (*self._order.again, number)}))

    def claims(self, numbers: Iterable[int]) -> dict[int, str]:
        """Who has claimed which of these tasks; an empty name in the moment before the worker has written it."""
        claimed = self.claimed(self._order)
        paths = {number: self._turn(self._order) / _name(number) for number in numbers if number in claimed}
        return {number: path.read_text(encoding="utf-8") for number, path in paths.items()}

    def failures(self) -> list[Failure]:
        """Errors of this turn, each told once."""
        found = []
        for path in sorted((self._home / "errors").glob(f"{self._order.turn}-*")):
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
            path.unlink()
        return found

    def sign(self, worker: str) -> Sign | None:
        """A worker's last sign of life."""
        try:
            return Sign(**json.loads((self._home / "workers" / worker).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    # The workers' side

    def order(self) -> Order:
        """What is to do. A folder that is gone is a closed one."""
        try:
            plain = json.loads((self._home / "order.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Order(closed=True)
        return Order(**{**plain, "again": tuple(plain["again"])})

    def tasks(self, order: Order) -> list[int]:
        """All tasks of a turn."""
        return json.loads((self._turn(order) / "tasks.json").read_text(encoding="utf-8"))

    def claimed(self, order: Order) -> set[int]:
        """The tasks of a turn that somebody has claimed."""
        return {int(name) for name in os.listdir(self._turn(order)) if name.isdecimal()}

    def claim(self, order: Order, number: int, worker: str) -> bool:
        """Try to make a task one's own."""
        try:
            with open(self._turn(order) / _name(number), "x", encoding="utf-8") as file:
                file.write(worker)
        except FileExistsError:
            return False
        return True

    def fail(self, order: Order, failure: Failure) -> None:
        """Say that a task cannot be done."""
        _write_json(self._home / "errors" / f"{order.turn}-{_name(failure.number)}", asdict(failure))

    def beat(self, worker: str, sign: Sign) -> None:
        """Show that a worker lives."""
        _write_json(self._home / "workers" / worker, asdict(sign))

    def _turn(self, order: Order) -> Path:
        return self._home / "turns" / order.turn

    def _write(self, order: Order) -> None:
        self._order = order
        _write_json(self._home / "order.json", asdict(order))


def _name(number: int) -> str:
    return f"{number:05d}"


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(value), encoding="utf-8")
