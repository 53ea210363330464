"""A worker on a node: takes tasks from a queue, one after another, until the driver is done.

It stays between phases, so that a recipe of many phases waits once in the cluster's queue and loads its libraries once;
it leaves when nothing has been asked of it for some minutes, or when the queue is gone.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
import zlib
from multiprocessing import connection
from pathlib import Path

from megalite.errors import DataError, UserError
from megalite.stations.runners.local import preloaded_processes
from megalite.stations.runners.task_queue import QueueState, TaskFailure, TaskQueue, WorkerHeartbeat
from megalite.stations.tasks import perform

SECONDS_BETWEEN_SIGNS = 5.0

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 0.5
"""Between two looks at the queue while there is nothing to do; it grows by half each time."""

IDLE_SECONDS = 300.0
"""A worker that was not needed for so long gives its core back. A later phase starts another one."""


def work(home: Path, name: str, num_processes: int = 1) -> None:
    """Serve a queue with some processes of this node, until it is closed or nothing was asked for a while.

    All of them end when one dies: who counts the living sees only the whole.

    Args:
        home: the queue's folder.
        name: of this worker, never used before. Processes are called NAME.0, NAME.1 ...

    Raises:
        DataError: there is no queue, or the name is none for a file.
        Exception: what a task raised, other than the user's mistakes.
    """
    if not (home / "workers").is_dir():
        raise DataError(f"{home}: no driver has put up a board there; give the folder OUT/slurm of `megalite data`")
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise DataError(f"--name: {name!r} cannot be a file's name; use letters and digits")
    if num_processes == 1:
        serve(home, f"{name}.0")
        return
    context = preloaded_processes()
    processes = [context.Process(target=serve, args=(home, f"{name}.{index}")) for index in range(num_processes)]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in connection.wait(list(running)):
            assert isinstance(sentinel, int), sentinel
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.kill()
                sys.exit(f"process {processes.index(process)} of worker {name} ended with code {process.exitcode}")


def serve(home: Path, name: str) -> None:
    """One process of a worker."""
    queue = TaskQueue(home)
    threading.Thread(target=_show_life, args=(queue, name), daemon=True).start()
    turn, left, num_again = "", [], 0
    pause, idle_since = FIRST_PAUSE_SECONDS, time.monotonic()
    while not (state := queue.state()).closed and time.monotonic() - idle_since < IDLE_SECONDS:
        if state.turn != turn:
            turn, num_again = state.turn, 0
            left = _unclaimed(queue, state, name) if turn else []
        left += state.again[num_again:]
        num_again = len(state.again)
        if not left:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        elif queue.claim(state, left[-1], name):
            _do(queue, state, left.pop(), name)
            pause, idle_since = FIRST_PAUSE_SECONDS, time.monotonic()
        else:
            taken = queue.claimed(state)
            left = [number for number in left if number not in taken]


def _unclaimed(queue: TaskQueue, state: QueueState, name: str) -> list[int]:
    """What is left of a turn; each worker begins at a place of its own, so that they seldom want the same."""
    taken = queue.claimed(state)
    left = [number for number in reversed(queue.tasks(state)) if number not in taken]
    start = zlib.crc32(name.encode()) % max(1, len(left))
    return left[start:] + left[:start]


def _do(queue: TaskQueue, state: QueueState, number: int, name: str) -> None:
    """Do a task; tell the driver if it fails. A fault ends this worker: it may be the node's."""
    print(f"{state.phase}: task {number} of {state.folder}", flush=True)
    try:
        perform(Path(state.folder), state.phase, number)
    except UserError as error:
        queue.fail(state, TaskFailure(number, "data" if isinstance(error, DataError) else "user", str(error), name))
    except Exception as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        queue.fail(state, TaskFailure(number, "disk full" if is_full else "fault", traceback.format_exc(), name))
        raise


def _show_life(queue: TaskQueue, name: str) -> None:
    beat = 0
    host, log = os.uname().nodename, os.path.realpath("/proc/self/fd/1")
    while True:
        queue.beat(name, WorkerHeartbeat(host, log, beat))
        beat += 1
        time.sleep(SECONDS_BETWEEN_SIGNS)
