"""A driver of work elsewhere: one at a time in a folder, and whatever ends it, it ends in order."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megalite.errors import EXIT_REQUEUE, UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGTERM: a job that is cancelled; SIGHUP: a terminal that is closed; SIGUSR1: `sbatch --signal`."""


@contextmanager
def only_driver(path: Path) -> Iterator[None]:
    """Hold a lock file for as long as the block runs; the system lets go of it when this process dies.

    A disk without locks is taken as it is.

    Raises:
        UserError: another process holds it.
    """
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise UserError(f"{path.parent}: {owner} is at work here; let it end, or stop it first") from error
        except OSError:
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Make signals that would end this process at once raise SystemExit (code 3), so that blocks are left in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        print(f"\nstopped by {signal.Signals(number).name}; run the same command again to go on", file=sys.stderr)
        sys.exit(EXIT_REQUEUE)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
