"""What a person sees while a run goes: a live line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megalite.engine.protocol import StepResult

WIDE_TERMINAL = 110
"""Columns from which the live line has room for a bar and all figures."""


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
        self._bar: Progress | None = None
        if self._console.is_terminal:
            bar = [BarColumn(bar_width=None)] if self._is_wide() else []
            columns = (TextColumn("step"), MofNCompleteColumn(), *bar, TextColumn("{task.fields[figures]}"))
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, figures="")
            self._bar.start()

    def step(self, step: int, result: StepResult, tokens_per_second: float, mfu: float) -> None:
        """Show a finished step."""
        loss = f"loss {result.loss:.4f}" if result.num_tokens else "no labels"
        speed = f"{tokens_per_second:,.0f} tok/s  mfu {mfu:.0%}"
        figures = f"{loss}  norm {result.grad_norm:.3f}  lr {result.lr:.2e}  {speed}"
        if self._bar is not None:
            short = f"{loss}  {speed}"
            self._bar.update(self._task, completed=step, figures=figures if self._is_wide() else short)
        elif step % self._log_every == 0 or step in (self._first_step + 1, self._total):
            self._console.print(f"step {step}/{self._total}  {figures}  left {_clock(self._seconds_left(step))}")

    def rewind(self, step: int) -> None:
        """Go on from an earlier step: what it took to come so far before says nothing of what is left."""
        self._start, self._first_step = time.monotonic(), step

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _is_wide(self) -> bool:
        return self._console.width >= WIDE_TERMINAL

    def _seconds_left(self, step: int) -> float:
        done = max(1, step - self._first_step)
        return (time.monotonic() - self._start) / done * (self._total - step)


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
