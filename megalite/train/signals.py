"""Requests: SIGTERM, SIGINT or a file RUN/STOP ask for a clean end, a file RUN/SAVE for a checkpoint.

All ranks follow at the same step: the trainer lets them vote. No torch here, so that a rank can listen before its
imports are done. A rank may sit in C++ waiting for others, where no handler of Python's runs, so a thread hears signals
too: until the first step there is nothing to save, and it ends the process at once; later, when nothing moves on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from megalite.errors import EXIT_REQUEUE
from megalite.train.heartbeat import Heartbeat

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is how Slurm warns of the end of a job's time (`sbatch --signal=USR1@60`)."""

STOP_FILE = "STOP"
"""A file of this name in the run's folder asks for the end, for as long as it is there."""

PARENT_VARIABLE = "MEGALITE_PARENT"
"""Process number of who started this one and forwards signals to it: killed, it cannot."""

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""

SAVE_FILE = "SAVE"
"""One of this name asks for a checkpoint, and goes when it is seen."""


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it requests to stop wait, and whoever is started then has them wait until it calls `hear`: a signal that
    comes before somebody listens would end a rank in the middle of an import, with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(number: int) -> None:
    """Get a signal when the parent ends, however it does; Linux alone has that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def hear() -> None:
    """Let requests in, those that have waited too; the end of the process that PARENT_VARIABLE names is one."""
    if PARENT_VARIABLE in os.environ and sys.platform == "linux":
        end_with_parent(signal.SIGTERM)
        if os.getppid() != int(os.environ[PARENT_VARIABLE]):
            os.kill(os.getpid(), signal.SIGTERM)  # it had ended before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def hear_or_leave() -> None:
    """`hear`, for ranks that have nothing to save: a request is the end of the process, without a word, whenever it
    comes. Not by an exception: one that comes while a callback of C runs is printed there, and lost."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_REQUEUE))
    hear()


class StopRequest:
    """Remembers that a signal asked for the end. Installed in each rank before anything else.

    Args:
        after_step: ask for the end after this step even without a signal; None for never.
    """

    def __init__(self, after_step: int | None = None) -> None:
        self.signal_name = ""
        self._after_step = after_step
        self._folder: Path | None = None
        self._has_begun = threading.Event()

    def install(self, heartbeat: Heartbeat, patience: float, give_up: Callable[[str], None]) -> None:
        """Listen, in the main thread.

        Args:
            heartbeat: says where this rank is.
            patience: seconds within one phase of a step after which a rank that was asked to stop hangs.
            give_up: is called in another thread with the reason, and does not return.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        ending = (ear, heartbeat, patience, give_up)
        threading.Thread(target=self._end_what_cannot, args=ending, name="stop", daemon=True).start()
        hear()

    def begin(self) -> None:
        """The first step is about to begin: from here on what was asked for waits for the end of a step."""
        self._has_begun.set()

    def watch(self, folder: Path) -> None:
        """Look for the files too; one rank does, for all."""
        self._folder = folder

    def is_asked(self, step: int) -> bool:
        """Whether this rank was asked to stop by the end of a step; the others may not have been yet."""
        return bool(self.signal_name) or self._is_due(step) or self._has_stop_file()

    def is_save_asked(self) -> bool:
        """Whether a checkpoint was asked for since `note_save`."""
        return self._folder is not None and (self._folder / SAVE_FILE).is_file()  # a folder could not be taken away

    def note_save(self) -> None:
        """The checkpoint that was asked for will be made."""
        if self._folder is not None:
            (self._folder / SAVE_FILE).unlink(missing_ok=True)

    def why(self, step: int) -> str:
        """For people."""
        if self._has_stop_file():
            return f"the file {STOP_FILE}"
        return self.signal_name or ("the step to stop after" if self._is_due(step) else "asked on another rank")

    def _is_due(self, step: int) -> bool:
        return self._after_step is not None and step >= self._after_step

    def _has_stop_file(self) -> bool:
        return self._folder is not None and (self._folder / STOP_FILE).exists()

    def _end_what_cannot(self, ear: int, heartbeat: Heartbeat, patience: float, give_up: Callable[[str], None]) -> None:
        """End the process at a signal, as long as nothing has begun, or when the end of the step does not come. A
        thread of its own."""
        while os.read(ear, 1)[0] not in STOP_SIGNALS:
            pass
        if not self._has_begun.is_set():
            print("stopped before the first step; there was nothing to save", file=sys.stderr, flush=True)
            os._exit(EXIT_REQUEUE)
        asked = time.monotonic()
        while (seconds := time.monotonic() - max(asked, heartbeat.entered)) < patience:
            time.sleep(min(1.0, patience - seconds))
        give_up(
            f"asked to stop, but nothing has moved on for {patience:g} s in {heartbeat.where}, so this rank ends "
            "without a save; the next start goes on from the last checkpoint (raise slurm.step_seconds if a phase of "
            "a step takes longer)"
        )

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
