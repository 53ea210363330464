"""A lock on a folder that a dead owner does not keep: on any disk that several machines see, whatever runs the work.

    OUT.lock    token, host, process, machine, beat        made exclusively, so that one process alone can
                                  beat: counted up in place every two seconds, while the owner lives

    found, and its owner is a process of this machine     the kernel says whether it lives
    found, and its owner is elsewhere                     it lives if its beat moves; clocks are never compared
    found, and it is dead                                 OUT.lock.TOKEN, the right to follow the dead one, is made
                                                          in the same way and renamed to OUT.lock: it is never missing

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
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from megalite.errors import DataError, UserError
from megalite.records import Record

SECONDS_BETWEEN_BEATS = 2.0

SILENCE_SECONDS = 60.0
"""An owner on another machine whose beat stands still for so long is taken for dead."""

SECONDS_BETWEEN_LOOKS = 0.2

SHORT = 12
"""Characters of a token in a file's name."""

RECORD_BYTES = 512
"""Of the file, filled up with blanks: it never grows."""


class Owner(Record):
    """Who holds a lock."""

    token: Annotated[str, Field(pattern="^[0-9a-f]*$")]
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
        self._take(self._path)
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
        return _holds(self._path, self._owner)

    def _take(self, path: Path) -> None:
        """Make a file, or follow a dead one in it."""
        while not self._make(path):
            other = _read(path)
            if other is not None and self._has_died(path, other) and self._follow(path, other):
                return

    def _follow(self, path: Path, dead: Owner) -> bool:
        """Put this owner in the place of a dead one; False if another has done so.

        Of all who found it dead, the one that makes a file of its token may do so. Who comes when that file has become
        the lock can make it once more, but sees then that the lock is not the dead one's any longer.
        """
        right = path.with_name(f"{path.name}.{dead.token[:SHORT] or 'unknown'}")
        self._take(right)
        try:
            if _holds(path, dead):
                os.replace(right, path)
            else:
                right.unlink()
        except FileNotFoundError:  # stopped in between for so long that another has taken the right
            pass
        return _holds(path, self._owner)

    def _make(self, path: Path) -> bool:
        """Try to make a file with this owner in it; False if it is there."""
        try:
            with suppress(FileExistsError):  # something that is no folder: the next line says so
                path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if path.is_dir():
                raise DataError(f"{path}: is a folder, where the lock of {self._folder} would lie; remove it") from None
            return False
        except OSError as error:
            raise DataError(f"{self._folder}: cannot be made: {error.strerror}; choose another folder") from error
        try:
            with open(descriptor, "wb") as file:
                file.write(_record(self._owner))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise DataError(
                f"{path}: cannot be written: {error.strerror}; make room, or choose another folder"
            ) from error
        return True

    def _has_died(self, path: Path, other: Owner) -> bool:
        """Whether the owner in a file is dead; False if that changed hands meanwhile.

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
            found = _read(path)
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


def remove_dead(path: Path, folder: Path) -> None:
    """Remove a lock that a dead process of this machine has left, where nobody wants to hold it."""
    with suppress(OSError, UserError):
        owner = _read(path)
        if owner is not None and owner.machine == this_machine() and owner.is_dead():
            with Lease(path, folder):
                pass


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


def _holds(path: Path, owner: Owner) -> bool:
    """Whether a file is of this very holding."""
    found = _read(path)
    return found is not None and found.token == owner.token
