"""What failures take from a run, and how often to save.

    time of an interval   M e^(R/M) (e^((i + s) / M) - 1)      failures at random, one every M seconds in the mean;
                                                              s to save, R from a failure until training goes on
    goodput               i over that                          share of the time that is kept

Exact for failures that have no memory (Daly 2006, equation 20), which interrupt saves and restarts too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1

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
