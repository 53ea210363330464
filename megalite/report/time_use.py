"""Where the time of a run went, from what every run writes down.

    total      from the launch, or the first start, to the last sign of life
    steps      the sum of the steps that count: those done again are in metrics.jsonl once
    saving     in which the loop stood still for a checkpoint
    validating
    other      starting, waiting for nodes, steps that a later attempt did again

`slurm.goodput` tells the attempts of a launched run apart; this works for every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megalite.report.run_data import RunData


@dataclass(frozen=True)
class TimeUse:
    """Seconds of a run."""

    total: float
    steps: float
    validating: float
    saving: float

    @property
    def other(self) -> float:
        """What is left."""
        return max(0.0, self.total - self.steps - self.validating - self.saving)

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that count."""
        return self.steps / self.total if self.total else 0.0


def time_use(run: RunData) -> TimeUse:
    """Account for a run's time."""
    steps, seconds = run.columns["step"], np.nan_to_num(run.columns.get("seconds", np.zeros(1)))
    computing = float(seconds.sum())
    validating = sum(event.get("seconds", 0.0) for event in run.of_kind("validation"))
    saving = sum(event.get("stalled_seconds", 0.0) for event in run.of_kind("save"))
    least = computing + validating + saving
    if not run.events:
        return TimeUse(least, computing, validating, saving)
    first, last = run.events[0]["time"], run.events[-1]["time"]
    if run.launched is not None:
        first = min(first, run.launched)
    since = seconds[steps > run.events[-1].get("step", 0)].sum() if run.events[-1]["event"] != "done" else 0.0
    return TimeUse(max(last + float(since) - first, least), computing, validating, saving)
