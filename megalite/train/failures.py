"""When to stop trying: failures in a row between which the run got nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.catalog import CHECKPOINTS, latest, step_of


@dataclass
class Failures:
    """Failures since the last new checkpoint."""

    in_a_row: int = 0
    last_step: int = 0
    """Of the newest checkpoint when the last one happened."""

    def add(self, run_dir: Path) -> int:
        """Count a failure of a run; how many there are now in a row."""
        newest = latest(run_dir / CHECKPOINTS)
        step = step_of(newest) if newest is not None else 0
        self.in_a_row = 1 if step > self.last_step else self.in_a_row + 1
        self.last_step = step
        return self.in_a_row
