"""Ordered work over processes: order, bounds, errors, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.data.workers import WAITING_PER_WORKER, ordered_map
from megalite.errors import DataError

REPOSITORY = Path(__file__).parents[2]


def slow_square(number: int) -> int:
    """Earlier items take longer, so that later ones are ready first."""
    time.sleep(0.02 * (number < 2))
    return number * number


def refuse_three(number: int) -> int:
    if number == 3:
        raise DataError("three is not allowed")
    return number


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_order_with_bounded_read_ahead(num_workers):
    """However fast the items could be read, only a few are handed out ahead of the results."""
    taken = 0

    def items():
        nonlocal taken
        for number in range(20):
            taken += 1
            yield number

    for done, result in enumerate(ordered_map(slow_square, items(), num_workers=num_workers)):
        assert result == done * done
        assert taken <= done + 1 + WAITING_PER_WORKER * num_workers
    assert taken == 20


@pytest.mark.parametrize("num_workers", [1, 2])
def test_errors_of_a_worker_are_raised_here(num_workers):
    """With their type and message, after the results before them."""
    results = []
    with pytest.raises(DataError, match="three is not allowed"):
        results.extend(ordered_map(refuse_three, range(10), num_workers=num_workers))
    assert results == [0, 1, 2]


def test_workers_end_with_their_parent():
    """kill -9 of the parent leaves no process."""
    script = """
import multiprocessing, time
from megalite.data.workers import ordered_map
work = ordered_map(abs, iter(range(100)), num_workers=2)
next(work)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
