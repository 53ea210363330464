"""Fencing: of all attempts to train in one run folder, only the newest may add a checkpoint.

An attempt that everyone believes dead may still run, behind a network that has come back. Its checkpoints must not come
among those of the attempt that replaced it.

    RUN/attempts/00001     who took it, where and when; made with O_EXCL, so no two attempts have one number
    RUN/attempts/00002     the newest: the one that may commit

    start    take a number -> sweep away unfinished saves of all others -> choose the checkpoint to start from
    commit   look for a higher number -> rename the unfinished folder to its name

Looking and renaming are two moves, and a new attempt may take its number in between. Its sweep closes the gap: it has
renamed the old attempt's unfinished folder, whose own rename then finds nothing; or the old one was first, and then
its checkpoint was there before the new attempt chose. Exclusive creation and renaming are atomic on NFS as well.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import CheckpointError

ATTEMPTS = "attempts"
"""Folder of a run that holds the tokens."""


class SupersededError(CheckpointError):
    """A newer attempt of the run has started; this one must end."""


@dataclass(frozen=True)
class Fence:
    """The token of one attempt."""

    folder: Path
    """The run's `attempts` folder."""
    attempt: int

    def check(self) -> None:
        """Refuse to go on when a newer attempt has started.

        Raises:
            SupersededError: with who the newer attempt is.
        """
        newest = newest_attempt(self.folder)
        if newest > self.attempt:
            raise SupersededError(
                f"{self.folder.parent}: this is attempt {self.attempt}, and attempt {newest} has started since "
                f"({_owner(self.folder, newest)}); this one saves nothing any more and ends"
            )


def take_attempt(folder: Path, number: int | None = None) -> Fence:
    """Become the newest attempt.

    Args:
        folder: the run's `attempts` folder.
        number: as a supervisor counts its attempts; None takes the next free one.

    Raises:
        SupersededError: the number was given, and it or a higher one has been taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        wanted = newest_attempt(folder) + 1 if number is None else number
        if number is not None and newest_attempt(folder) >= number:
            newest = newest_attempt(folder)
            raise SupersededError(
                f"{folder.parent}: this was to be attempt {number}, and attempt {newest} has started already "
                f"({_owner(folder, newest)}); start a new attempt with a higher number"
            )
        try:
            descriptor = os.open(folder / f"{wanted:05d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            continue  # another attempt was faster: look again
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "time": round(time.time(), 3)}
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(owner, file)
            file.flush()
            os.fsync(file.fileno())
        return Fence(folder, wanted)


def newest_attempt(folder: Path) -> int:
    """The highest number taken; 0 when there is none."""
    if not folder.is_dir():
        return 0
    return max((int(name) for name in os.listdir(folder) if name.isdecimal()), default=0)


def _owner(folder: Path, attempt: int) -> str:
    try:
        owner = json.loads((folder / f"{attempt:05d}").read_text(encoding="utf-8"))
        return f"host {owner['host']}, pid {owner['pid']}, {time.strftime('%F %T', time.localtime(owner['time']))}"
    except (OSError, ValueError, KeyError):
        return "whose token cannot be read"  # it is being written at this moment
