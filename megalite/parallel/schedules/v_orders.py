"""Schedules whose chunks lie in a V, two a rank: the first rank has the first layers and the last.

    ranks      0   1   2   3
    down       0   1   2   3        chunks
    up         7   6   5   4

So backward passes begin where forward passes do, and every rank keeps as much as any other.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalite.parallel.schedules.operations import (
    Kind,
    Operation,
    PipelineSchedule,
    ScheduleError,
    make_schedule,
    place,
)
from megalite.parallel.schedules.simulation import ChunkCosts

PREFERENCE: tuple[Kind, ...] = ("I", "F", "W")
"""What a rank of ZB-V does first of what it could begin at once: what others wait for most."""


def zb_v(
    pp: int, num_micro_batches: int, costs: tuple[ChunkCosts, ...], in_flight: int | None = None
) -> PipelineSchedule:
    """ZB-V: split backward passes over a V (Qi et al. 2024, Pipeline Parallelism with Controllable Memory).

    Found by a walk through time: the pass that can begin first is done, of one rank's an I before an F before a W, and
    no F where a rank keeps as many micro-batches as 1F1B's first one.

    Args:
        costs: chunk by chunk; only the times of their passes count.
        in_flight: micro-batches of one chunk that a rank keeps at most; None for 2 pp.
    """
    return _Walk(pp, num_micro_batches, costs, in_flight or 2 * pp).schedule()


class _Walk:
    """A walk through time over the ranks of a V."""

    def __init__(self, pp: int, num_micro_batches: int, costs: tuple[ChunkCosts, ...], in_flight: int):
        self._placement, self._num_micro_batches = place("v", pp, 2), num_micro_batches
        self._costs, self._in_flight = costs, in_flight
        self._orders: list[list[Operation]] = [[] for _ in range(pp)]
        self._free, self._kept = [0.0] * pp, [0] * pp
        self._ends: dict[tuple[Kind, int, int], float] = {}
        self._next = {(kind, chunk): 0 for kind in PREFERENCE for chunk in range(2 * pp)}
        """The micro-batch of each chunk's next pass of a kind."""

    def schedule(self) -> PipelineSchedule:
        """All passes of all micro-batches."""
        pp, ranks = len(self._orders), self._placement.ranks
        options = [self._first(rank) for rank in range(pp)]
        for _ in range(len(PREFERENCE) * len(ranks) * self._num_micro_batches):
            found = [(option[0], rank, option[-1]) for rank, option in enumerate(options) if option is not None]
            if not found:
                raise ScheduleError(f"ZB-V: no rank of {pp} can go on with {self._in_flight} micro-batches in flight")
            start, rank, operation = min(found)
            self._do(rank, operation, start)
            chunk = operation.chunk
            for each in {rank, ranks[max(chunk - 1, 0)], ranks[min(chunk + 1, len(ranks) - 1)]}:
                options[each] = self._first(each)
        return make_schedule(self._placement, self._num_micro_batches, self._orders)

    def _first(self, rank: int) -> tuple[float, int, int, Operation] | None:
        """What a rank would do next: when, how much it is preferred, and what."""
        return min(self._options(rank), default=None)

    def _options(self, rank: int) -> Iterator[tuple[float, int, int, Operation]]:
        for chunk in self._placement.chunks_of(rank):
            for preference, kind in enumerate(PREFERENCE):
                micro_batch = self._next[kind, chunk]
                if micro_batch == self._num_micro_batches or (kind == "F" and self._kept[rank] == self._in_flight):
                    continue
                ready = self._ready(kind, chunk, micro_batch)
                if ready is not None:
                    operation = Operation(kind, chunk, micro_batch)
                    yield max(self._free[rank], ready), preference, -chunk, operation

    def _ready(self, kind: Kind, chunk: int, micro_batch: int) -> float | None:
        """When the inputs of a pass are there; None while they are not made."""
        inputs: list[tuple[Kind, int, int]] = []
        if kind == "F" and chunk > 0:
            inputs = [("F", chunk - 1, micro_batch)]
        elif kind == "I":
            inputs = [("F", chunk, micro_batch)]
            inputs += [("I", chunk + 1, micro_batch)] if chunk + 1 < len(self._costs) else []
        elif kind == "W":
            inputs = [("I", chunk, micro_batch)]
        ends = [self._ends.get(each) for each in inputs]
        return None if None in ends else max((end for end in ends if end is not None), default=0.0)

    def _do(self, rank: int, operation: Operation, start: float) -> None:
        kind, chunk, _ = operation
        end = start + self._costs[chunk].seconds(kind)
        self._ends[operation], self._free[rank] = end, end
        self._orders[rank].append(operation)
        self._next[kind, chunk] += 1
        self._kept[rank] += {"F": 1, "I": 0, "W": -1}.get(kind, 0)


def dualpipe_v(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """DualPipe-V (DeepSeek-AI 2024, DualPipe, cut in half): a forward pass down the V beside a backward pass up it, and
    the other way round, so that the messages of one can travel while the other computes.

    Raises:
        ScheduleError: there are fewer than 2 pp micro-batches.
    """
    if num_micro_batches < 2 * pp:
        raise ScheduleError(f"dualpipe-v needs at least 2 x pp = {2 * pp} micro-batches, found {num_micro_batches}")
    orders = [_dualpipe_order(pp, rank, num_micro_batches) for rank in range(pp)]
    return make_schedule(place("v", pp, 2), num_micro_batches, orders)


def _dualpipe_order(pp: int, rank: int, num_micro_batches: int) -> list[Operation]:
    """The eight parts of one rank's order; passes that come alone are split where another rank waits for them."""
    order, behind = _DualPipeRank(pp, rank), pp - 1 - rank
    for _ in range(2 * behind):
        order.forward(down=True)
    for _ in range(rank + 1):
        order.forward(down=True)
        order.forward(down=False)
    for _ in range(behind):
        order.split(down=False)
        order.weight()
        order.forward(down=False)
    for _ in range(num_micro_batches - 2 * pp + rank + 1):
        order.forward(down=True)
        order.backward(down=False)
        order.forward(down=False)
        order.backward(down=True)
    for _ in range(behind):
        order.backward(down=False)
        order.forward(down=False)
        order.backward(down=True)
    for number in range(2 * (rank + 1)):
        finish = order.split if number > rank else order.backward
        finish(down=number % 2 == 1)
    for _ in range(behind):
        order.weight()
        order.split(down=True)
    return order.finished()


class _DualPipeRank:
    """A rank's order as it grows: each kind of pass takes the next micro-batch of its chunk."""

    def __init__(self, pp: int, rank: int):
        self._chunks = {True: rank, False: 2 * pp - 1 - rank}
        self._forward, self._back = {True: 0, False: 0}, {True: 0, False: 0}
        self._held: list[Operation] = []
        self._order: list[Operation] = []

    def forward(self, *, down: bool) -> None:
        self._order.append(Operation("F", self._chunks[down], self._forward[down]))
        self._forward[down] += 1

    def backward(self, *, down: bool) -> None:
        self._order.append(Operation("B", self._chunks[down], self._back[down]))
        self._back[down] += 1

    def split(self, *, down: bool) -> None:
        """The input's part now, the weights' when `weight` comes to it."""
        chunk, micro_batch = self._chunks[down], self._back[down]
        self._order.append(Operation("I", chunk, micro_batch))
        self._held.append(Operation("W", chunk, micro_batch))
        self._back[down] += 1

    def weight(self) -> None:
        """The weights' part that has waited longest."""
        self._order.append(self._held.pop(0))

    def finished(self) -> list[Operation]:
        return self._order + self._held
