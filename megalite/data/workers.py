"""Work over several processes that comes back in order: the same result with any number of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING_PER_WORKER = 2
"""Items handed out ahead of time: enough to keep a worker busy, few enough to bound the memory."""


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int) -> Iterator[Result]:
    """Yield function(item) for each item, in the order of the items, with bounded read-ahead.

    Processes are spawned, not forked: Arrow and the tokenizers hold threads, whose locks do not survive a fork.

    Args:
        function: a picklable function; it runs in the worker processes, or here when num_workers is 1.
        items: read here, one by one.
        num_workers: number of processes.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_follow_parent)
    try:
        waiting = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > WAITING_PER_WORKER * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone: a worker would wait for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
