"""A disk that is full, closed to us or gone: nothing that another attempt would mend, and often someone else's doing.

The supervisor waits for it to be mended. Its own notes need the disk too: `retry_on_disk_fault` keeps
trying meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megalite.checkpoint.catalog import CHECKPOINTS, check_disk
from megalite.errors import CheckpointError
from megalite.train.run_folder import PLAN

POLL_SECONDS = 1.0

STORAGE_FAULTS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    errno.ENOTCONN,
)
"""Full, closed by permissions, mounted read-only, broken, or not to be reached: a person can mend each."""

PROBE = ".probe"

DAMAGE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What a file that says something else than it should leads to."""

ResultT = TypeVar("ResultT")


def find_fault(run_dir: Path) -> str | None:
    """What keeps a run from its next checkpoint, for people; None when nothing does."""
    try:
        plan = json.loads((run_dir / PLAN).read_text(encoding="utf-8"))
        check_disk(run_dir / CHECKPOINTS, plan["num_parameters"])
    except CheckpointError as error:
        return str(error)
    except (OSError, *DAMAGE):  # there is none yet, or it cannot be read, which shows at once
        pass
    for folder in (run_dir, run_dir / "slurm", run_dir / CHECKPOINTS):
        try:
            if folder == run_dir or folder.exists():
                (folder / PROBE).write_bytes(b"")
                (folder / PROBE).unlink(missing_ok=True)
        except OSError as error:
            return f"{folder} cannot be written ({os.strerror(error.errno or 0)})"
    return None


def retry_on_disk_fault(action: Callable[[], ResultT], patience_seconds: float) -> ResultT:
    """Write or read something small, as soon as the disk lets it.

    Raises:
        OSError: it did not for too long, or something else is wrong.
    """
    began = time.monotonic()
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in STORAGE_FAULTS or time.monotonic() - began > patience_seconds:
                raise
            time.sleep(POLL_SECONDS)
