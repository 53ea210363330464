"""A lock on a folder that a dead owner does not keep: on any disk that several machines see, whatever runs the work.

    OUT.lock    token, host, process, machine, beat        made exclusively, so that one process alone can
                                  beat: counted up in place every two seconds, while the owner lives

    found, and its owner is a process of this machine     the kernel says whether it lives
    found, and its owner is elsewhere                     it lives if its beat moves; clocks are never compared
    found, and it is dead                                 moved aside, looked at once more, then made anew

Kernel locks (`fcntl`) would let go by themselves, but shared disks without a lock service grant them to everybody. The
beat overwrites bytes that are there, so a full disk does not stop it. An owner that was stopped for longer than
SILENCE_SECONDS on another machine loses the lock: it finds that out by `check`, which is asked before anything is
committed, and tasks find it out by `tasks.OWNER_FILE`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from megalite.data.records import Record
from megalite.errors import DataError, UserError

SECONDS_BETWEEN_BEATS = 2.0

SILENCE_SECONDS = 60.0
"""An owner on another machine whose beat stands still for so long is taken for dead."""

SECONDS_BETWEEN_LOOKS = 0.2

LOOKS_BEFORE_LOST = 5

RECORD_BYTES = 512
"""Of the file, filled up with blanks: it never grows."""


class Owner(Record):
    """Who holds a lock."""

    token: str
    """Of this very holding."""
    host: str
    pid: PositiveInt
    machine: str
    """Where `pid` means something: a boot of a kernel, and a namespace of processes in it."""
    started: str
    """When the process began, in the kernel's ticks: process numbers are used again."""
    beat: NonNegativeInt = 0

    @classmethod
    def here(cls) -> Owner:
        """This process, holding anew."""
        pid = os.getpid()
        token, host = uuid.uuid4().hex, os.uname().nodename
        return cls(token=token, host=host, pid=pid, machine=this_machine(), started=_state(pid)[1])

    def is_dead(self) -> bool:
        """Whether a process of this machine has ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's
        state, started = _state(self.pid)
        return state in ("Z", "X") or started not in ("", self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease:
    """Hold a folder for as long as a block runs.

    Args:
        path: the lock's file.
        folder: what it is about, for messages.

    Raises:
        UserError: on entering: another process that lives holds it.
        DataError: on entering: the file cannot be made.
    """

    def __init__(self, path: Path, folder: Path):
        self._path = path
        self._folder = folder
        self._owner = Owner.here()
        self._ended = threading.Event()

    @property
    def token(self) -> str:
        """Names this very holding."""
        return self._owner.token

    def __enter__(self) -> Lease:
        while not self._make():
            other = _read(self._path)
            if other is None or not self._has_died(other):
                continue  # gone, or another's by now
            _move_aside(self._path, other)
        self._thread = threading.Thread(target=self._show_life, name="megalite-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    def is_lost(self) -> bool:
        """Whether another has taken the lock. A disk that does not answer has taken nothing."""
        for _ in range(LOOKS_BEFORE_LOST):
            with suppress(OSError):
                if self._is_mine():
                    return False
            time.sleep(SECONDS_BETWEEN_LOOKS)  # it may lie aside for a moment, see `_move_aside`
        try:
            return not self._is_mine()
        except OSError:
            return False

    def check(self) -> None:
        """Refuse to go on when another has taken the lock.

        Raises:
            UserError: it has.
        """
        if self.is_lost():
            raise UserError(taken_over(self._folder))

    def _is_mine(self) -> bool:
        found = _read(self._path)
        return found is not None and found.token == self._owner.token

    def _make(self) -> bool:
        """Try to make the file; False if it is there."""
        try:
            with suppress(FileExistsError):  # something that is no folder: the next line says so
                self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError as error:
            raise DataError(f"{self._folder}: cannot be made: {error.strerror}; choose another folder") from error
        try:
            with open(descriptor, "wb") as file:
                file.write(_record(self._owner))
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise DataError(
                f"{self._path}: cannot be written: {error.strerror}; make room, or choose another folder"
            ) from error
        return True

    def _has_died(self, other: Owner) -> bool:
        """Whether the owner is dead; False if the lock changed hands meanwhile.

        Raises:
            UserError: it lives.
        """
        if other.machine == this_machine():
            if other.is_dead():
                return True
            raise UserError(_at_work(self._folder, other))
        began, is_told = time.monotonic(), False
        while time.monotonic() - began < SILENCE_SECONDS:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            found = _read(self._path)
            if found is None or found.token != other.token:
                return False
            if found.beat != other.beat:
                raise UserError(_at_work(self._folder, other))
            if not is_told and time.monotonic() - began > 2 * SECONDS_BETWEEN_BEATS:
                is_told = True
                text = f"{self._folder}: {other} was at work here; waiting {SILENCE_SECONDS:.0f} s for a sign of life"
                print(text, file=sys.stderr, flush=True)
        return True

    def _show_life(self) -> None:
        """Count up the beat. What a disk does to it for a while is no reason to stop."""
        owner = self._owner
        while not self._ended.wait(SECONDS_BETWEEN_BEATS):
            owner = owner.model_copy(update={"beat": owner.beat + 1})
            with suppress(OSError):
                if self._is_mine():
                    with open(self._path, "r+b") as file:
                        file.write(_record(owner))


def remove_dead(path: Path) -> None:
    """Remove a lock that a dead process of this machine has left, where nobody wants to hold it."""
    with suppress(OSError):
        owner = _read(path)
        if owner is not None and owner.machine == this_machine() and owner.is_dead():
            _move_aside(path, owner)


def taken_over(folder: Path) -> str:
    """What to say to an owner that has lost its lock."""
    return (
        f"{folder}: another process has taken over here, since this one gave no sign of life for {SILENCE_SECONDS:.0f} "
        "s; this one ends, and what it has finished is kept for the other"
    )


@cache
def this_machine() -> str:
    """A name of the kernel's present boot and of this namespace of processes; of the host, where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename


def _state(pid: int) -> tuple[str, str]:
    """State of a process (Z is one that has ended and that nobody has asked about), and when it began; empty where the
    kernel does not say, or hides other users' processes."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def _at_work(folder: Path, owner: Owner) -> str:
    return f"{folder}: {owner} is at work here; let it end, or stop it first"


def _record(owner: Owner) -> bytes:
    text = owner.model_dump_json().encode()
    assert len(text) < RECORD_BYTES, owner
    return text.ljust(RECORD_BYTES - 1) + b"\n"


def _read(path: Path) -> Owner | None:
    """Who holds a lock; None if it is not there. One that is no record, because it is being made or was left half made,
    is somebody's who gives no sign of life.

    Raises:
        OSError: the disk does not answer.
    """
    try:
        return Owner.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return Owner(token="", host="an unknown host", pid=1, machine="", started="")


def _move_aside(path: Path, dead: Owner) -> None:
    """Take a dead owner's lock away. If another was faster and it is its lock that was moved, put that back."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    found = _read(aside)
    if found is not None and found.token != dead.token:
        with suppress(OSError):  # where that is not possible, the owner notices, and ends in order
            os.link(aside, path)
    aside.unlink(missing_ok=True)
