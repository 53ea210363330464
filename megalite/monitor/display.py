"""What a person sees while a run goes: a live line on a terminal, plain lines everywhere else.

wide     step 120/300 ━━━━━━━━━━━━━━╸━━━━━━━━  loss 5.8885  norm 0.878  lr 2.00e-04  1,179 tok/s  mfu 17%  left 0:02:40
narrow   step 120/300 ━━━━━━━━━╸━━━━━━━━━━━━━━  left 0:02:40
         loss 5.8885  norm 0.878  lr 2.00e-04  1,179 tok/s
         mfu 17%
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megalite.engine.protocol import StepResult

SHORTEST_BAR = 10
"""Columns; with less room than that left, the figures get lines of their own."""

REFRESHES_PER_SECOND = 4

GAP = "  "


class Display:
    """Shows steps as they end. Only rank 0 has one that speaks.

    Args:
        total_steps: steps of the whole run.
        first_step: steps done before this attempt.
        log_every: steps between lines when the output is not a terminal.
        stream: where to write.
    """

    def __init__(self, *, total_steps: int, first_step: int, log_every: int, stream: TextIO | None = None):
        stream = stream or sys.stdout
        self._total, self._log_every = total_steps, log_every
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._start, self._first_step = time.monotonic(), first_step
        self._live: Live | None = None
        if self._console.is_terminal:
            self._line = LiveLine(first_step, total_steps)
            self._live = Live(self._line, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
            self._live.start()

    def step(self, step: int, result: StepResult, tokens_per_second: float, mfu: float) -> None:
        """Show a finished step."""
        figures = (
            f"loss {result.loss:.4f}" if result.num_tokens else "no labels",
            f"norm {result.grad_norm:.3f}",
            f"lr {result.lr:.2e}",
            f"{tokens_per_second:,.0f} tok/s",
            f"mfu {mfu:.0%}",
        )
        left = f"left {_clock(self._seconds_left(step))}"
        if self._live is not None:
            self._line.show(step, figures, left)
        elif step % self._log_every == 0 or step in (self._first_step + 1, self._total):
            self._console.print(GAP.join((f"step {step}/{self._total}", *figures, left)))

    def rewind(self, step: int) -> None:
        """Go on from an earlier step: what it took to come so far before says nothing of what is left."""
        self._start, self._first_step = time.monotonic(), step

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _seconds_left(self, step: int) -> float:
        done = max(1, step - self._first_step)
        return (time.monotonic() - self._start) / done * (self._total - step)


class LiveLine:
    """The last step, drawn anew for whatever width the terminal has: nothing is left out, it takes more lines."""

    def __init__(self, step: int, total_steps: int):
        self._step, self._total = step, total_steps
        self._figures: tuple[str, ...] = ()
        self._left = ""

    def show(self, step: int, figures: tuple[str, ...], left: str) -> None:
        """Take over a step's figures, and the time left."""
        self._step, self._figures, self._left = step, figures, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        where = f"step {self._step}/{self._total}"
        whole = GAP.join(each for each in (*self._figures, self._left) if each)
        if len(where) + len(whole) + SHORTEST_BAR + 2 * len(GAP) <= options.max_width:
            yield self._with_bar(where, whole)
            return
        has_room = len(where) + len(self._left) + 2 * len(GAP) <= options.max_width
        yield self._with_bar(where, self._left if has_room else "")
        line = ""
        for figure in (*self._figures, *([] if has_room else [self._left])):
            longer = f"{line}{GAP if line else ''}{figure}"
            if line and len(longer) > options.max_width:
                yield Text(line)
                longer = figure
            line = longer
        yield Text(line)

    def _with_bar(self, before: str, behind: str) -> Table:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(before, ProgressBar(total=self._total, completed=self._step), behind)
        return row


class Silence:
    """The display of every rank but the first."""

    def step(self, step: int, result: StepResult, tokens_per_second: float, mfu: float) -> None:
        """Nothing."""

    def rewind(self, step: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
