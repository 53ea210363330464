"""Progress of a long job with its rate and the time left: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from megalite.kernel_cache import is_compiling

SECONDS_BETWEEN_LINES = 10.0
"""Pace of the plain lines."""

COMPILING = "compiling first, once after an installation or an update"

SECONDS_BETWEEN_LOOKS, LOOKS_THAT_TELL = 0.5, 4
"""Whether somebody compiles. Reading compiled code holds the same locks, but not for so long."""


class ProgressReporter(Protocol):
    """What a station tells of its advance."""

    def start(self, title: str, total: float | None, unit: str) -> None:
        """Begin a stretch of work of `total` units; None when the total is unknown."""
        ...

    def advance(self, amount: float) -> None:
        """`amount` more units are done."""
        ...

    def finish(self, summary: str) -> None:
        """The stretch is over."""
        ...


class NoProgress:
    """Tells nothing."""

    def start(self, title: str, total: float | None, unit: str) -> None:
        pass

    def advance(self, amount: float) -> None:
        pass

    def finish(self, summary: str) -> None:
        pass


class _CompileWatch:
    """Says why nothing moves yet while kernels are compiled, here or by a worker.

    Args:
        tell: called once, when it is so.
    """

    def __init__(self, tell: Callable[[], None]):
        self._tell = tell
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch until `stop`, which is called when something moves."""
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; nothing is told from here on."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        num_looks = 0
        while num_looks < LOOKS_THAT_TELL:
            if self._over.wait(SECONDS_BETWEEN_LOOKS):
                return
            num_looks = num_looks + 1 if is_compiling() else 0
        self._tell()


class PlainLines:
    """A line at the start, every ten seconds and at the end.

    Args:
        stream: where they go.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._watch = _CompileWatch(lambda: self._print(f"{COMPILING} ..."))

    def start(self, title: str, total: float | None, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = 0.0
        self._started = self._last_line = time.monotonic()
        self._print("...")
        self._watch.start()

    def advance(self, amount: float) -> None:
        self._watch.stop()
        self._done += amount
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        rate = self._done / (now - self._started)
        line = f"{self._done:,.1f} {self._unit}, {rate:,.1f} {self._unit}/s"
        if self._total:
            line = f"{min(1.0, self._done / self._total):.0%}, {line}"
            if rate > 0:  # a first task may have nothing to show for itself, and then nobody knows
                line += f", {max(0.0, self._total - self._done) / rate:.0f} s left"
        self._print(line)

    def finish(self, summary: str) -> None:
        self._watch.stop()
        self._print(f"{summary} ({time.monotonic() - self._started:.1f} s)")

    def _print(self, text: str) -> None:
        print(f"{self._title}: {text}", file=self._stream, flush=True)


class ProgressBar:
    """A live bar drawn by rich, replaced by a summary line at the end of each stretch.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        amount = TextColumn("{task.completed:,.1f} {task.fields[unit]}, {task.fields[rate]:,.1f}/s")
        columns = (
            TextColumn("{task.description:<15}"),
            BarColumn(),
            TaskProgressColumn(),
            amount,
            TimeRemainingColumn(),
        )
        self._console = Console(file=stream)
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._watch = _CompileWatch(self._explain)

    def start(self, title: str, total: float | None, unit: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._bar = self._bars.add_task(title, total=total, unit=unit, rate=0.0)
        self._bars.start()
        self._watch.start()

    def _explain(self) -> None:
        self._bars.update(self._bar, description=f"{self._title} ({COMPILING})")

    def advance(self, amount: float) -> None:
        self._watch.stop()
        (task,) = self._bars.tasks
        rate = (task.completed + amount) / max(1e-9, time.monotonic() - self._started)
        self._bars.update(self._bar, description=self._title, advance=amount, rate=rate)

    def finish(self, summary: str) -> None:
        self._watch.stop()
        self._bars.remove_task(self._bar)
        self._bars.stop()
        self._console.print(f"{self._title}: {summary} ({time.monotonic() - self._started:.1f} s)", highlight=False)

    def close(self) -> None:
        """Give the terminal back, also in the middle of a stretch."""
        self._watch.stop()
        self._bars.stop()


@contextmanager
def progress_on(stream: TextIO = sys.stderr) -> Iterator[ProgressReporter]:
    """The kind of progress that suits a stream."""
    if not stream.isatty():
        yield PlainLines(stream)
        return
    bar = ProgressBar(stream)
    try:
        yield bar
    finally:
        bar.close()
