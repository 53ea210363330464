"""Requests to stop, whenever they come."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from megalite.errors import EXIT_REQUEUE

BUSY = """
import time

from megalite.train.signals import hear_or_leave


class Busy:
    def __del__(self):
        time.sleep(0.1)


hear_or_leave()
print("listens", flush=True)
while True:
    Busy()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_without_anything_to_save_leaves_from_within_a_callback(number):
    """Where an exception would be printed, and lost."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listens\n"
        child.send_signal(number)
        try:
            assert child.wait(timeout=60) == EXIT_REQUEUE
        finally:
            child.kill()
        assert child.stderr.read() == b""
