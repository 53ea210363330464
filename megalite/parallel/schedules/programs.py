"""Orders with their messages: for each rank one list of passes, sends and receives.

Receiving just before use and sending just after deadlocks, if sends wait for their receiver, in every one of our
schedules: two neighbours send to each other at once. So messages are placed while all ranks' orders are walked together
in time: where one rank sends, the receive is appended to the other's list at that very moment. All lists are then cuts
of one order of everything, and no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from megalite.parallel.schedules.operations import Operation, Pass, PipelineSchedule, goes_to, made_by, needs
from megalite.parallel.schedules.simulation import ChunkCosts, Timeline, simulate

SENDS_UNDER_WAY = 8
"""Messages that a rank has begun to send and that may not have gone. Who is further ahead of its receivers waits: it
would have to soon, and what it sends takes memory until then."""


class Instruction(NamedTuple):
    """One line of a rank's program."""

    what: Literal["do", "send", "receive"]
    operation: Operation
    """What is done; of a message, the pass whose result travels: a chunk's output behind an F, the gradient of its
    input behind a B or I."""
    peer: int = -1
    """Of a message, the other rank."""

    def __str__(self) -> str:
        if self.what == "do":
            return str(self.operation)
        return f"{self.what} {self.operation} {'to' if self.what == 'send' else 'from'} rank {self.peer}"


Program = tuple[Instruction, ...]


def make_programs(schedule: PipelineSchedule, costs: tuple[ChunkCosts, ...] | None = None) -> tuple[Program, ...]:
    """Every rank's program.

    Args:
        costs: chunk by chunk, by which the walk goes; None takes all passes as equally long.

    Raises:
        ScheduleError: ranks wait for each other for ever.
    """
    ranks = schedule.placement.ranks
    timeline = simulate(schedule, costs or (ChunkCosts(),) * len(ranks))
    programs: list[list[Instruction]] = [[] for _ in schedule.orders]
    for rank, operation in _as_they_end(timeline, len(ranks)):
        programs[rank].append(Instruction("do", operation))
        receiver = goes_to(operation, ranks)
        if receiver is not None and receiver != rank:
            programs[rank].append(Instruction("send", operation, receiver))
            programs[receiver].append(Instruction("receive", operation, rank))
    return tuple(map(tuple, programs))


def _as_they_end(timeline: Timeline, num_chunks: int) -> Iterator[tuple[int, Operation]]:
    """All passes with their ranks, in the order in which they end; none before what it needs, however short it is."""
    places, made = [0] * len(timeline.spans), set[Pass]()
    able: list[tuple[float, int]] = []
    waiting: dict[Pass, list[int]] = {}

    def look(rank: int) -> None:
        """See what a rank's next pass waits for."""
        spans, place = timeline.spans[rank], places[rank]
        if place == len(spans):
            return
        missing = next((each for each in needs(spans[place].operation, num_chunks) if each not in made), None)
        if missing is None:
            heappush(able, (spans[place].end, rank))
        else:
            waiting.setdefault(missing, []).append(rank)

    for rank in range(len(places)):
        look(rank)
    while able:
        _, rank = heappop(able)
        operation = timeline.spans[rank][places[rank]].operation
        yield rank, operation
        places[rank] += 1
        look_again = [rank]
        result = made_by(operation)
        if result is not None:
            made.add(result)
            look_again += waiting.pop(result, [])
        for each in look_again:
            look(each)
