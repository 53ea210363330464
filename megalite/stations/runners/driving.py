"""A driver of work elsewhere: whatever ends it, it ends in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megalite.errors import EXIT_REQUEUE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGTERM: a job that is cancelled; SIGHUP: a terminal that is closed; SIGUSR1: `sbatch --signal`."""


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Make signals that would end this process at once raise SystemExit (code 3), so that blocks are left in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        print(f"\nstopped by {signal.Signals(number).name}; run the same command again to go on", file=sys.stderr)
        sys.exit(EXIT_REQUEUE)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
