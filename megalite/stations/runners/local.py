"""Where a station's tasks run: in this process, or in a pool of processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from megalite.stations.runners.signals import interrupted_later, uninterrupted
from megalite.stations.tasks import perform

PRELOADED = "megalite.corpus.preload"

MAX_SOCKET_FOLDER_BYTES = 70
"""A Unix socket's name has 107 bytes at most; multiprocessing adds a folder and a name of its own."""


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


class InProcess:
    """One task after the other, here."""

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            perform(folder, phase, number)
            yield number


class LocalPool:
    """Processes of this machine, started with the first tasks and kept for later ones; use as a context manager.

    They are not forked from this one, for Arrow and the tokenizers hold threads, whose locks do not survive a fork, but
    from one that only loads what all need (`preload.py`).

    Args:
        num_workers: processes; 1 does the work in this one.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, folder: Path, phase: str, numbers: Sequence[int]) -> Iterator[int]:
        if self._num_workers == 1 or len(numbers) == 1:
            yield from InProcess().run(folder, phase, numbers)
            return
        waiting: dict[Future, int] = {}
        try:
            with interrupted_later():  # workers that start lose what they start from when their parent ends
                if self._pool is None:
                    context = preloaded_processes()
                    self._pool = ProcessPoolExecutor(self._num_workers, mp_context=context, initializer=follow_parent)
                waiting |= {self._pool.submit(perform, folder, phase, number): number for number in numbers}
            for future in as_completed(waiting):
                future.result()
                yield waiting[future]
        finally:
            if not all(future.done() for future in waiting):
                self._close()  # a task that still runs would write into a folder that is being removed

    def _close(self) -> None:
        """Give up what has not begun, and wait for what has. The pool itself does it: it takes futures that others have
        cancelled ill when its workers are dead, and nobody would tell how those that ran ended."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def preloaded_processes() -> SpawnContext | ForkServerContext:
    """What starts processes that have the libraries and the stations loaded.

    They are forked by a server with a socket among the temporary files; where its name would be too long, each process
    loads for itself.
    """
    if len(os.fsencode(tempfile.gettempdir())) > MAX_SOCKET_FOLDER_BYTES:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    with uninterrupted():
        forkserver.ensure_running()  # while it loads, Ctrl-C is the parent's
    return context


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone: a worker would wait for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a pool's worker follows"
    connection.wait([parent.sentinel])
    os._exit(1)
