"""What failures take from a run, and how often to save.

    time of an interval   M e^(R/M) (e^((i + s) / M) - 1)      failures at random, one every M seconds in the mean;
                                                              s to save, R from a failure until training goes on
    goodput               i over that                          share of the time that is kept

Exact for failures that have no memory (Daly 2006, equation 20), which interrupt saves and restarts too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1
from typing import Any

from megalite.planner.machines import Machine
from megalite.planner.whole_run import WholeRun

SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True)
class Reliability:
    """How often a run is interrupted, and what that takes."""

    between_failures: float
    """Seconds, of all nodes together."""
    save: float
    """Seconds that training stands still for a checkpoint."""
    restart: float
    """Seconds from a failure until the last checkpoint's step is trained again."""

    def goodput(self, interval: float) -> float:
        """Share of the time that is kept, when so many seconds are trained between checkpoints."""
        mean = self.between_failures
        if (interval + self.save + self.restart) / mean > LONGEST:
            return 0.0
        return interval / (mean * exp(self.restart / mean) * expm1((interval + self.save) / mean))

    def best_interval(self) -> float:
        """Seconds between checkpoints that keep the most, by cutting the span in which they lie."""
        low, high = 0.0, self.between_failures * LONGEST
        for _ in range(CUTS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self.goodput(left) < self.goodput(right):
                low = left
            else:
                high = right
        return (low + high) / 2


LONGEST = 50.0
"""Of a mean time between failures: nothing is kept of longer intervals, nor where a restart takes so long."""
CUTS = 200
"""Thirds of a span that are left: to the last bits of a float."""


def reliability(failures_a_day: float, *, ranks: int, ranks_per_node: int, save: float, restart: float) -> Reliability:
    """Of a run on so many ranks.

    Args:
        failures_a_day: of a node.
        save, restart: seconds.
    """
    nodes = -(-ranks // ranks_per_node)
    return Reliability(SECONDS_A_DAY / (failures_a_day * nodes), save, restart)


@dataclass(frozen=True)
class UnderFailures:
    """A whole run that is interrupted, and saves as often as keeps the most of its time."""

    between_failures: float
    """Seconds, in the mean."""
    save_every: int
    """Steps."""
    interval: float
    """Seconds that they take."""
    goodput: float
    """Share of the time that is kept."""
    seconds: float
    """Of the whole run; infinite where nothing is kept."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "hours_between": self.between_failures / 3600,
            "save_every": self.save_every,
            "goodput": self.goodput,
            "hours": self.seconds / 3600 if self.goodput else None,
        }

    def __str__(self) -> str:
        hours = f": {self.seconds / 3600:,.1f} hours" if self.goodput else ""
        return (
            f"a failure every {self.between_failures / 3600:,.1f} hours in the mean: save every {self.save_every:,} "
            f"steps ({self.interval / 60:,.0f} minutes; checkpoint.every={self.save_every}), which keeps "
            f"{100 * self.goodput:.1f} % of the time{hours}"
        )


def under_failures(run: WholeRun, ranks: int, machine: Machine, numbers: tuple[float, float, float]) -> UnderFailures:
    """How often a run should save, and what it takes then.

    Args:
        numbers: failures of a node a day, and seconds of a save and of a restart.
    """
    often, save, restart = numbers
    known = reliability(often, ranks=ranks, ranks_per_node=machine.ranks_per_node, save=save, restart=restart)
    of_step = run.seconds / run.steps
    steps = min(run.steps, max(1, round(known.best_interval() / of_step)))
    kept = known.goodput(steps * of_step)
    return UnderFailures(
        known.between_failures, steps, steps * of_step, kept, run.seconds / kept if kept else float("inf")
    )
