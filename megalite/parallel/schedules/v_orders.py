"""Schedules whose chunks lie in a V, two a rank: the first rank has the first layers and the last.

    ranks      0   1   2   3
    down       0   1   2   3        chunks
    up         7   6   5   4

So backward passes begin where forward passes do, and every rank keeps as much as any other.
"""

from __future__ import annotations

from megalite.parallel.schedules.operations import (
    Operation,
    PipelineSchedule,
    ScheduleError,
    make_schedule,
    place,
)


def zb_v(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """ZB-V (Qi et al. 2024, Pipeline Parallelism with Controllable Memory): split backward passes over a V. No rank
    keeps more than 1F1B's first one, and with passes of equal length none waits once the pipeline is full."""
    enough = max(num_micro_batches, 2 * pp - 1)
    orders = [
        [operation for operation in _zb_order(pp, rank, enough) if operation.micro_batch < num_micro_batches]
        for rank in range(pp)
    ]
    return make_schedule(place("v", pp, 2), num_micro_batches, orders)


def _zb_order(pp: int, rank: int, num_micro_batches: int) -> list[Operation]:
    """One rank's order. Down until the first micro-batch comes up; then each pass up begins its way back."""
    order, behind = _VRank(pp, rank), pp - 1 - rank
    for _ in range(2 * behind + 1):
        order.forward(down=True)
    for _ in range(rank):
        order.forward(down=False)
        order.forward(down=True)
    for _ in range(behind + 1):
        order.forward(down=False)
        order.split(down=False)
        order.weight()
    for number in range(pp, num_micro_batches):
        if number + behind < num_micro_batches:
            order.forward(down=True)
        order.split(down=True)
        order.weight()
        order.forward(down=False)
        order.split(down=False)
        order.weight()
    for _ in range(rank):
        order.split(down=True)
        order.split(down=False)
    for _ in range(behind + 1):
        order.split(down=True)
        order.weight()
    return order.finished()


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
    order, behind = _VRank(pp, rank), pp - 1 - rank
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


class _VRank:
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
