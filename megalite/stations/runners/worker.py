"""A worker on a node: takes tasks from a board, one after another, until the driver is done.

It stays between phases, so that a recipe of many phases waits once in the cluster's queue and loads its libraries once;
it leaves when nothing has been asked of it for some minutes, or when the board is gone.
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
from megalite.stations.runners.board import Board, Failure, Order, Sign
from megalite.stations.runners.local import preloaded_processes
from megalite.stations.tasks import perform

SECONDS_BETWEEN_SIGNS = 5.0

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 0.5
"""Between two looks at the board while there is nothing to do; it grows by half each time."""

IDLE_SECONDS = 300.0
"""A worker that was not needed for so long gives its core back. A later phase starts another one."""


def work(home: Path, name: str, num_processes: int = 1) -> None:
    """Serve a board with some processes of this node, until it is closed or nothing was asked for a while.

    All of them end when one dies: who counts the living sees only the whole.

    Args:
        home: the board's folder.
        name: of this worker, never used before. Processes are called NAME.0, NAME.1 ...

    Raises:
        DataError: there is no board, or the name is none for a file.
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
    board = Board(home)
    threading.Thread(target=_show_life, args=(board, name), daemon=True).start()
    turn, left, num_again = "", [], 0
    pause, idle_since = FIRST_PAUSE_SECONDS, time.monotonic()
    while not (order := board.order()).closed and time.monotonic() - idle_since < IDLE_SECONDS:
        if order.turn != turn:
            turn, num_again = order.turn, 0
            left = _unclaimed(board, order, name) if turn else []
        left += order.again[num_again:]
        num_again = len(order.again)
        if not left:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        elif board.claim(order, left[-1], name):
            _do(board, order, left.pop(), name)
            pause, idle_since = FIRST_PAUSE_SECONDS, time.monotonic()
        else:
            taken = board.claimed(order)
            left = [number for number in left if number not in taken]


def _unclaimed(board: Board, order: Order, name: str) -> list[int]:
    """What is left of a turn; each worker begins at a place of its own, so that they seldom want the same."""
    taken = board.claimed(order)
    left = [number for number in reversed(board.tasks(order)) if number not in taken]
    start = zlib.crc32(name.encode()) % max(1, len(left))
    return left[start:] + left[:start]


def _do(board: Board, order: Order, number: int, name: str) -> None:
    """Do a task; tell the driver if it fails. A fault ends this worker: it may be the node's."""
    print(f"{order.phase}: task {number} of {order.folder}", flush=True)
    try:
        perform(Path(order.folder), order.phase, number)
    except UserError as error:
        board.fail(order, Failure(number, "data" if isinstance(error, DataError) else "user", str(error), name))
    except Exception as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        board.fail(order, Failure(number, "disk full" if is_full else "fault", traceback.format_exc(), name))
        raise


def _show_life(board: Board, name: str) -> None:
    beat = 0
    host, log = os.uname().nodename, os.path.realpath("/proc/self/fd/1")
    while True:
        board.beat(name, Sign(host, log, beat))
        beat += 1
        time.sleep(SECONDS_BETWEEN_SIGNS)
