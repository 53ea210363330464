"""Where the time of traced steps went, as a function of what ran when.

    computing       some product, kernel or op runs; it belongs to a phase
    exposed         something is communicated, and nothing computes
    idle            neither: Python, a batch that is waited for, work that the device has not been given yet

At every moment of a step exactly one of the three holds, so they add up to its time. Communication beside a
computation is hidden, and costs nothing but what it takes away from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.phases import OTHER, PHASES
from megalite.profile.intervals import NONE, Intervals, both, length, minus, union


@dataclass(frozen=True)
class Activity:
    """What ran when, in microseconds."""

    steps: Intervals
    """The traced steps."""
    compute: Mapping[str, Intervals]
    """What computes, by the phase it was asked for in; `OTHER` for what no phase has asked for."""
    communication: Intervals
    """From when a message is begun until it has been received, waiting for other ranks included."""
    host: Mapping[str, Intervals]
    """The phase that the program itself stands in."""


@dataclass(frozen=True)
class PhaseTime:
    """Of one phase, in microseconds over all traced steps."""

    computing: float
    idle: float


@dataclass(frozen=True)
class Breakdown:
    """Of the traced steps, in microseconds: phases and exposed communication add up to the total."""

    total: float
    phases: dict[str, PhaseTime]
    communication: float
    exposed: float
    """Of it, what is not beside a computation."""

    @property
    def computing(self) -> float:
        """In all phases."""
        return sum(each.computing for each in self.phases.values())

    @property
    def idle(self) -> float:
        """In all phases."""
        return sum(each.idle for each in self.phases.values())


def break_down(activity: Activity) -> Breakdown:
    """Sum up what ran in the traced steps. Where two phases compute at once, the earlier one of a step counts."""
    steps = activity.steps
    computing, left = {}, steps
    for phase in (*PHASES, OTHER):
        own = both(left, activity.compute.get(phase, NONE))
        computing[phase], left = length(own), minus(left, own)
    exposed = both(left, activity.communication)
    left, idle = minus(left, exposed), {}
    for phase in PHASES:
        own = both(left, activity.host.get(phase, NONE))
        idle[phase], left = length(own), minus(left, own)
    idle[OTHER] = length(left)
    return Breakdown(
        length(steps),
        {phase: PhaseTime(computing[phase], idle[phase]) for phase in (*PHASES, OTHER)},
        length(both(steps, union(activity.communication))),
        length(exposed),
    )
