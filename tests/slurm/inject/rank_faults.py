"""Faults on request, in every rank that `tests/kit/preload` calls `install` in: a file FOLDER/fault-RANK says which.

exit    the process ends at once, with exit code 0, as if all were well
raise   the training loop gets an exception
hold    the training loop stands still for a while, until it is asked to stop, or FOLDER/release is there; the heart
        goes on beating

The rank that SLOW_RANK_VARIABLE names has a slow device, as far as its timed products tell. A step takes STEP_SECONDS
at least, so that a test can strike before the last one, by sleeping: these runs have many steps, and others need the
cores.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "MEGALITE_TEST_FAULTS"

SLOW_RANK_VARIABLE = "MEGALITE_TEST_SLOW_RANK"

STEP_SECONDS = 0.3

LARGE_PRODUCT = 768

POLL_SECONDS = 0.1

SECONDS_HELD = 45
"""Longer than this cluster takes to miss a node, shorter than `slurm.step_seconds` of the tests' runs."""

REQUESTS = (signal.SIGUSR1, signal.SIGTERM)
"""Of the supervisor, and of Slurm, which tells the agents' step of a preemption at once."""

HOLD = signal.SIGRTMIN + 1
"""A handler runs in the main thread, which is the training loop's."""


def _hold(*_: object) -> None:
    """Stand still. A request to stop ends it, and is then handled as ever."""
    before, asked = {number: signal.getsignal(number) for number in REQUESTS}, []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        before[number](number, frame)

    for number in REQUESTS:
        signal.signal(number, note)
    deadline = time.monotonic() + SECONDS_HELD
    release = Path(os.environ[FOLDER_VARIABLE]) / "release"
    while not (asked or release.exists()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for number, handle in before.items():
        signal.signal(number, handle)


def _wait_for_fault(path: Path, main_thread: int) -> None:
    while not path.exists():
        time.sleep(POLL_SECONDS)
    fault = path.read_text()
    path.unlink()
    if fault == "exit":
        os._exit(0)
    if fault == "hold":
        signal.pthread_kill(main_thread, HOLD)
        return
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main_thread), ctypes.py_object(ArithmeticError))


def _keep_pace() -> None:
    """From now on no step is over sooner than `STEP_SECONDS` after it began."""
    from megalite.train.loop import TrainingLoop

    step = TrainingLoop._train_step

    def paced(loop: TrainingLoop, *arguments: Any) -> Any:
        ends = time.monotonic() + STEP_SECONDS
        found = step(loop, *arguments)
        time.sleep(max(0.0, ends - time.monotonic()))
        return found

    TrainingLoop._train_step = paced  # type: ignore[method-assign]


def install() -> None:
    """Listen for faults from now on, in a rank's main thread."""
    if "RANK" not in os.environ or "MEGALITE_ATTEMPT" not in os.environ:
        return
    path = Path(os.environ[FOLDER_VARIABLE]) / f"fault-{os.environ['RANK']}"
    signal.signal(HOLD, _hold)
    _keep_pace()
    threading.Thread(target=_wait_for_fault, args=(path, threading.get_ident()), daemon=True).start()
    if os.environ.get(SLOW_RANK_VARIABLE) == os.environ["RANK"]:
        from megalite.train.components import straggler_timer

        straggler_timer.PRODUCT_SIZE = {"cpu": LARGE_PRODUCT}
