"""What failures take from a run, and how often to save.

    time of an interval   M e^(R/M) (e^((i + s) / M) - 1)      failures at random, one every M seconds in the mean;
                                                              s to save, R from a failure until training goes on
    goodput               i over that                          share of the time that is kept

Exact for failures that have no memory (Daly 2006, equation 20), which interrupt saves and restarts too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1
from typing import Any, NamedTuple

from megalite.architecture.costs import ELEMENT_BYTES
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.planner.holdings import state_bytes_per_parameter
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


class Faults(NamedTuple):
    """What is said of failures."""

    often: float
    """Of a node, a day."""
    detect: float
    """Seconds from a failure until it is noticed."""
    restart: float
    """Seconds from there until the last checkpoint's step is trained again."""
    save: float | None
    """Seconds that training stands still for a checkpoint; None for what its size takes."""


SAVED_A_SECOND = 2.27e9
"""Bytes that a node writes and syncs: 1.43 GB in 0.63 s (docs/benchmarks/checkpoint.md)."""


def share_of_node(config: Config, plan: RunPlan, machine: Machine) -> float:
    """Bytes of a checkpoint, weights as the optimizer has them and its state, that each node writes."""
    of_weight = ELEMENT_BYTES[config.precision.master_dtype] + state_bytes_per_parameter(config, plan)
    return plan.num_parameters * of_weight / -(-plan.world_size // machine.ranks_per_node)


def said_of_save(share: float) -> str:
    """What a save is taken to need where nothing is said of it."""
    return (
        f"a save is taken to hold training up for {share / SAVED_A_SECOND:,.1f} s: {share / 1e9:,.1f} GB a node at "
        f"{SAVED_A_SECOND / 1e9:.1f} GB/s, as one node wrote to its own disk; give --save-seconds for yours"
    )


LEAST_KEPT = 1e-3
"""Of the time: a run that keeps less is said never to end."""


@dataclass(frozen=True)
class UnderFailures:
    """A whole run that is interrupted, and saves as often as keeps the most of its time."""

    known: Reliability
    save_every: int
    """Steps."""
    interval: float
    """Seconds that they take."""
    goodput: float
    """Share of the time that is kept."""
    run: WholeRun
    """Without failures."""

    @property
    def ends(self) -> bool:
        """Enough is kept for the run to come to its end."""
        return self.goodput >= LEAST_KEPT

    @property
    def whole(self) -> WholeRun:
        """The run with its failures: what it takes in all, where it ends."""
        clean, kept = self.run, self.goodput
        energy, price = (None if each is None else each / kept for each in (clean.megawatt_hours, clean.price))
        return WholeRun(clean.steps, clean.seconds / kept, clean.rank_hours / kept, energy, price)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; null of a run that never ends."""
        names = ("hours", "rank_hours", "megawatt_hours", "price")
        whole = self.whole.to_dict() if self.ends else dict.fromkeys(names)
        return {
            "hours_between": self.known.between_failures / 3600,
            "save_seconds": self.known.save,
            "restart_seconds": self.known.restart,
            "save_every": self.save_every if self.ends else None,
            "goodput": self.goodput,
            **{name: whole[name] for name in names},
        }

    def __str__(self) -> str:
        often, again = f"a failure every {_span(self.known.between_failures)} in the mean", self.known.restart
        if not self.ends:
            of_step = self.interval / self.save_every
            return (
                f"{often}: such a run never ends, however often it saves: it takes {_span(again)} until training goes "
                f"on, {_span(of_step)} a step and {_span(self.known.save)} a save. Use fewer nodes, or let less fail"
            )
        _, _, in_all = str(self.whole).partition(": ")
        return (
            f"{often}: save every {self.save_every:,} steps ({self.interval / 60:,.0f} minutes; "
            f"checkpoint.every={self.save_every}), which keeps {100 * self.goodput:.1f} % of the time: {in_all}"
        )


def _span(seconds: float) -> str:
    """In the unit in which it is no fraction."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.3g} s"


def under_failures(run: WholeRun, ranks: int, machine: Machine, faults: Faults, share: float) -> UnderFailures:
    """How often a run should save, and what it takes then.

    Args:
        share: bytes of a checkpoint that a node writes, which say how long a save takes where `faults` does not.
    """
    save = share / SAVED_A_SECOND if faults.save is None else faults.save
    restart = faults.detect + faults.restart
    known = reliability(faults.often, ranks=ranks, ranks_per_node=machine.ranks_per_node, save=save, restart=restart)
    of_step = run.seconds / run.steps
    steps = min(run.steps, max(1, round(known.best_interval() / of_step)))
    return UnderFailures(known, steps, steps * of_step, known.goodput(steps * of_step), run)
