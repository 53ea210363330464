"""Signals while tasks run: whatever ends a driver of work, it ends in order; Ctrl-C waits for what must not be torn."""

from __future__ import annotations

import signal
import sys
import threading
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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Processes that are started within it ignore Ctrl-C, and so do those that they start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C within it is held back until its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if held and callable(former):
            former(*held[0])
