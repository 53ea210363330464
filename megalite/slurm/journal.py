"""What a supervisor writes down: events, where it stands, what it waits for, and lines for people."""

from __future__ import annotations

import time
from contextlib import suppress

from megalite.slurm.folder import LaunchFolder
from megalite.slurm.storage import bear_with_disk


class Journal:
    """A supervisor's notes.

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
        bear_with_disk(lambda: self._folder.add_event(kind, job=self._job, **details), self._patience_seconds)
        say(" ".join([time.strftime("%F %T"), kind, *(f"{name}={value}" for name, value in details.items())]))

    def state(self, **changes: object) -> None:
        """Write down where the run stands."""
        bear_with_disk(lambda: self._folder.write_state(**changes), self._patience_seconds)

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
