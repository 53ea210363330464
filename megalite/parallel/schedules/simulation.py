"""When each pass of a schedule runs, if passes take as long as they are said to: the timeline, the bubble, the peak.

A rank does its passes in order, each as soon as it is free and the pass's inputs are there; what comes from another
rank is there a while after it was made. What a chunk keeps from its forward pass is released by its backward pass, or,
where that is split, in part by I and the rest by W.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import add

from megalite.parallel.schedules.operations import FIRST_PLACE, KINDS, Codes, Kind, Operation, PipelineSchedule


@dataclass(frozen=True)
class ChunkCosts:
    """What the passes of one micro-batch through a chunk take, in any unit of time and of memory."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    kept: float = 1.0
    """Kept from F until B, or until I."""
    held: float = 0.5
    """Of a split backward pass: kept from I until W."""

    def seconds(self, kind: Kind) -> float:
        """Time of a pass."""
        if kind == "B":
            return self.input_gradient + self.weight_gradient
        return {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}[kind]

    def memory_change(self, kind: Kind) -> float:
        """What a pass adds to what is kept."""
        return {"F": self.kept, "B": -self.kept, "I": self.held - self.kept, "W": -self.held}[kind]


@dataclass(frozen=True)
class TimedPass:
    """A pass and when it runs."""

    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time."""

    spans: tuple[tuple[TimedPass, ...], ...]
    """Of each rank, in order."""
    peaks: tuple[float, ...]
    """The most that each rank keeps for backward passes at once."""

    @cached_property
    def end(self) -> float:
        """When the last rank has finished."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step in which each rank waits."""
        busy = [sum(span.end - span.start for span in spans) for spans in self.spans]
        return tuple(1.0 - each / self.end if self.end else 0.0 for each in busy)

    @property
    def bubble(self) -> float:
        """The share in which ranks wait, over all of them."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(schedule: PipelineSchedule, costs: tuple[ChunkCosts, ...], link: float = 0.0) -> Timeline:
    """Run a schedule.

    Args:
        costs: chunk by chunk.
        link: time of a message between ranks.

    Raises:
        ScheduleError: ranks wait for each other for ever; it says where each stands.
        ValueError: as many costs as the schedule has chunks were not given.
    """
    durations, wiring = _durations(schedule, costs), schedule.wiring
    spans = [list[TimedPass]() for _ in schedule.orders]
    for rank, cost, end in zip(wiring.rank, wiring.cost, _ends(schedule, durations, link), strict=True):
        mine = spans[rank]
        mine.append(TimedPass(schedule.orders[rank][len(mine)], end - durations[cost], end))
    changes = memory_changes(costs)
    return Timeline(tuple(map(tuple, spans)), tuple(peak_kept(codes, changes) for codes in schedule.codes))


def end_of(schedule: PipelineSchedule, costs: tuple[ChunkCosts, ...], link: float = 0.0) -> float:
    """When the last rank has finished, which is sooner known than the whole timeline."""
    return max(_ends(schedule, _durations(schedule, costs), link), default=0.0)


def _durations(schedule: PipelineSchedule, costs: Sequence[ChunkCosts]) -> list[float]:
    """As `cost_index` numbers them."""
    if len(costs) != schedule.placement.num_chunks:
        raise ValueError(f"{len(costs)} costs for a schedule of {schedule.placement.num_chunks} chunks")
    return [each.seconds(kind) for each in costs for kind in KINDS]


def _ends(schedule: PipelineSchedule, durations: Sequence[float], link: float) -> list[float]:
    """When each pass is over, as the wiring has them."""
    wiring = schedule.wiring
    ends = [0.0, -inf]  # at AT_ONCE, and at NEVER
    for cost, before, sender in zip(wiring.cost, wiring.before, wiring.sender, strict=True):
        start, arrival = ends[before], ends[sender] + link
        ends.append((arrival if arrival > start else start) + durations[cost])
    return ends[FIRST_PLACE:]


ByPass = Sequence[float]
"""Something of a pass of each kind through each chunk, as `cost_index` numbers them."""


def memory_changes(costs: Sequence[ChunkCosts]) -> ByPass:
    """What passes add to what is kept, given the costs by chunk."""
    return [each.memory_change(kind) for each in costs for kind in KINDS]


def peak_kept(codes: Codes, changes: ByPass) -> float:
    """The most that a rank keeps for backward passes at once, given its passes (`PipelineSchedule.codes`)."""
    return max(itertools.accumulate(map(changes.__getitem__, codes)), default=0.0)


def peak_at_work(codes: Codes, changes: ByPass, at_work: ByPass) -> float:
    """The same with what a rank has for a moment of a pass, beside what is kept before it."""
    before = itertools.accumulate(map(changes.__getitem__, codes), initial=0.0)
    return max(map(add, before, map(at_work.__getitem__, codes)), default=0.0)
