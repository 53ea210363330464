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

from megalite.parallel.schedules.operations import (
    Kind,
    Operation,
    Pass,
    PipelineSchedule,
    ScheduleError,
    made_by,
    needs,
    shown,
)


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
    costs: tuple[ChunkCosts, ...]
    """Chunk by chunk."""

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most that each rank keeps for backward passes at once."""
        return tuple(peak_kept([span.operation for span in spans], self.costs) for spans in self.spans)

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
    """
    num_ranks, num_chunks = len(schedule.orders), len(costs)
    finished: dict[Pass, tuple[float, int]] = {}
    waiting: dict[Pass, list[int]] = {}
    spans: list[list[TimedPass]] = [[] for _ in range(num_ranks)]
    able = list(range(num_ranks))
    while able:
        rank = able.pop()
        mine, order = spans[rank], schedule.orders[rank]
        for place in range(len(mine), len(order)):
            operation = order[place]
            wanted = needs(operation, num_chunks)
            missing = next((each for each in wanted if each not in finished), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            arrivals = [end + (link if maker != rank else 0.0) for end, maker in map(finished.__getitem__, wanted)]
            start = max([mine[-1].end if mine else 0.0, *arrivals])
            end = start + costs[operation.chunk].seconds(operation.kind)
            mine.append(TimedPass(operation, start, end))
            made = made_by(operation)
            if made is not None:
                finished[made] = end, rank
                able += waiting.pop(made, [])
    if waiting:
        raise ScheduleError(_stuck(schedule, spans, waiting))
    return Timeline(tuple(map(tuple, spans)), costs)


def peak_kept(order: Sequence[Operation], costs: Sequence[ChunkCosts]) -> float:
    """The most that a rank keeps for backward passes at once, given its order of passes and the costs by chunk."""
    changes = (costs[operation.chunk].memory_change(operation.kind) for operation in order)
    return max(itertools.accumulate(changes), default=0.0)


def _stuck(schedule: PipelineSchedule, spans: list[list[TimedPass]], waiting: dict[Pass, list[int]]) -> str:
    """Who waits for what."""
    sentences = [
        f"rank {rank} waits with {schedule.orders[rank][len(spans[rank])]} for {shown(wanted)}"
        for wanted, ranks in waiting.items()
        for rank in ranks
    ]
    return "no rank can go on: " + "; ".join(sorted(sentences))
