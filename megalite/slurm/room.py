"""A full disk: nothing that another attempt would mend, and often someone else's doing. The supervisor waits for room.

Its own notes need some too: `note` keeps trying while there is none.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint.catalog import CHECKPOINTS, check_disk
from megalite.errors import CheckpointError
from megalite.train.run_folder import PLAN

SECONDS_BETWEEN_LOOKS = 1.0

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def lack_of_room(run_dir: Path) -> str | None:
    """What is missing for the next checkpoint of a run, or None; a run that has no plan yet lacks nothing."""
    try:
        plan = json.loads((run_dir / PLAN).read_text(encoding="utf-8"))
        check_disk(run_dir / CHECKPOINTS, plan["num_parameters"])
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError):
        return None
    return None


def note(write: Callable[[], object], patience_seconds: float) -> None:
    """Write something small, as soon as the disk has room for it.

    Raises:
        OSError: it had none for too long, or something else is wrong with it.
    """
    began = time.monotonic()
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in NO_ROOM or time.monotonic() - began > patience_seconds:
                raise
            time.sleep(SECONDS_BETWEEN_LOOKS)
