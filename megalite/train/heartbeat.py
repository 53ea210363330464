"""Signs of life of a rank: a file that a thread of it writes anew each second, and a supervisor on any node reads.

The thread is stopped with the process and starves with the node, so a missing beat means a frozen rank; a beat whose
step does not change means a rank that waits or is stuck. Times in the file are ages, and the file's modification is by
the clock of the file server, so clocks of nodes need not agree. The file keeps its length and is written in place: a
beat needs no room, so a full disk does not look like a frozen rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megalite.train.in_place import read_in_place, write_in_place

SECONDS_BETWEEN_BEATS = 1.0

BEAT_BYTES = 192
"""Length of the file: what is said, and blanks."""

NUM_PRODUCTS = 4
"""How many products are kept: a rank that is slow in all of them is slow."""

START = -1
"""Step of a rank that has not begun its first one: it imports, compiles or loads."""

DONE = "done"

PHASES = ("start", "data", "train", "validate", "save", DONE)
"""What a rank does, in the order of a step."""


@dataclass(frozen=True)
class Beat:
    """What a rank said last."""

    time: float
    """When it said so: the file's modification, by the file server's clock."""
    step: int
    phase: str
    """One of PHASES."""
    since: float
    """When it entered the phase, by the same clock."""
    step_seconds: float = 0.0
    """How long its last training step took, waiting for others included."""
    product_seconds: float = 0.0
    """The shortest of its last timed products (`train.probe`); 0 before there are some."""


class Heartbeat:
    """Beats for one rank.

    Args:
        path: the file to write; None does nothing.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self._step, self._phase, self._entered, self._step_seconds = START, "start", time.monotonic(), 0.0
        self._products: deque[float] = deque(maxlen=NUM_PRODUCTS)
        self._ended = threading.Event()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._beat(path)
            threading.Thread(target=self._go_on, args=(path,), name="heart", daemon=True).start()

    @property
    def is_watched(self) -> bool:
        """Whether there is anyone to read."""
        return self._path is not None

    @property
    def entered(self) -> float:
        """When this rank entered its phase, as `time.monotonic` says."""
        return self._entered

    @property
    def where(self) -> str:
        """For people."""
        return f"step {self._step}, {self._phase}"

    def note_product(self, seconds: float) -> None:
        """Say how long a timed product took."""
        self._products.append(seconds)

    def enter(self, phase: str, step: int) -> None:
        """Say what this rank does from now on. Costs nothing: the thread writes."""
        now = time.monotonic()
        if self._phase == "train":
            self._step_seconds = now - self._entered
        self._step, self._phase, self._entered = step, phase, now

    def stop(self) -> None:
        """Leave a last beat, and no more."""
        self._ended.set()
        if self._path is not None:
            with suppress(OSError):
                self._beat(self._path)

    def _go_on(self, path: Path) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_BEATS):
            with suppress(OSError):  # an absent disk stops no training; the supervisor will look for the beat
                self._beat(path)

    def _beat(self, path: Path) -> None:
        content = {
            "step": self._step,
            "phase": self._phase,
            "age": round(time.monotonic() - self._entered, 3),
            "step_seconds": round(self._step_seconds, 4),
            "product_seconds": round(min(self._products), 6) if len(self._products) == NUM_PRODUCTS else 0.0,
        }
        write_in_place(path, content, BEAT_BYTES)


def beat_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"{rank:05d}.json"


def read_beats(folder: Path) -> dict[int, Beat]:
    """The last beat of every rank that has left one."""
    beats = {}
    for path in folder.glob("[0-9]*.json"):
        said, written = read_in_place(path)
        if said is None:
            continue
        since = written - said["age"]
        beats[int(path.stem)] = Beat(
            written, said["step"], said["phase"], since, said["step_seconds"], said["product_seconds"]
        )
    return beats
