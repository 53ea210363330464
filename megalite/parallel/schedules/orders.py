"""Schedules whose chunks lie in rounds: 1F1B, interleaved 1F1B, ZB-H1.

Each rank begins with some forward passes, then does one forward and one backward pass in turn, and ends with what is
left of the backward passes. (Narayanan et al. 2021, sections 2.2.1 and 2.2.2; Qi et al. 2023, section 2.1.)
"""

from __future__ import annotations

from contextlib import suppress

from megalite.parallel.schedules.operations import (
    ChunkPlacement,
    Kind,
    Operation,
    PipelineSchedule,
    ScheduleError,
    make_schedule,
    place,
)


def one_f_one_b(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """1F1B: at most as many micro-batches in flight as there are ranks from here to the end."""
    return _interleaved(pp, num_micro_batches, 1, 0)


def interleaved(pp: int, num_micro_batches: int, chunks_per_rank: int) -> PipelineSchedule:
    """1F1B over several chunks a rank: the pipeline fills and drains in shorter passes, for more messages.

    Micro-batches go through the chunks in groups of pp, the last group taking what is over. Then the usual number of
    forward passes at the start can be too few, so ranks do some more.
    """
    for more in range(pp * chunks_per_rank):
        schedule = _interleaved(pp, num_micro_batches, chunks_per_rank, more)
        with suppress(ScheduleError):
            _ = schedule.wiring
            return schedule
    raise AssertionError(f"no interleaved schedule of {num_micro_batches} micro-batches over {pp} x {chunks_per_rank}")


def zb_h1(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """1F1B with split backward passes: rank r holds r weight gradients back, and makes them while the pipeline drains.
    As many micro-batches are in flight on every rank as on the first."""
    orders = []
    for rank, order in enumerate(one_f_one_b(pp, num_micro_batches).orders):
        split: list[Operation] = []
        for kind, chunk, micro_batch in order:
            split.append(Operation("F" if kind == "F" else "I", chunk, micro_batch))
            if kind == "B" and micro_batch >= rank:
                split.append(Operation("W", chunk, micro_batch - rank))
        held = range(max(0, num_micro_batches - rank), num_micro_batches)
        orders.append(split + [Operation("W", rank, micro_batch) for micro_batch in held])
    return make_schedule(place("loop", pp, 1), num_micro_batches, orders)


def forward_only(placement: ChunkPlacement, num_micro_batches: int) -> PipelineSchedule:
    """Forward passes alone, as evaluation does them: groups of pp micro-batches through the chunks of each rank."""
    pp = placement.num_ranks
    orders = [
        [
            Operation("F", chunk, micro_batch)
            for first in range(0, num_micro_batches, pp)
            for chunk in placement.chunks_of(rank)
            for micro_batch in range(first, min(first + pp, num_micro_batches))
        ]
        for rank in range(pp)
    ]
    return make_schedule(placement, num_micro_batches, orders)


def _interleaved(pp: int, num_micro_batches: int, chunks: int, more: int) -> PipelineSchedule:
    orders = []
    for rank in range(pp):
        forward, backward = (_in_groups(rank, pp, num_micro_batches, chunks, kind) for kind in ("F", "B"))
        warm = pp - 1 - rank if chunks == 1 else (chunks - 1) * min(pp, num_micro_batches) + 2 * (pp - 1 - rank)
        warm = min(warm + more, len(forward))
        turns = [each for pair in zip(forward[warm:], backward, strict=False) for each in pair]
        orders.append(forward[:warm] + turns + backward[len(forward) - warm :])
    return make_schedule(place("loop", pp, chunks), num_micro_batches, orders)


def _in_groups(rank: int, pp: int, num_micro_batches: int, chunks: int, kind: Kind) -> list[Operation]:
    """A rank's passes in one direction: a group of micro-batches through its chunks, then the next group."""
    rounds = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    starts = [pp * number for number in range(max(1, num_micro_batches // pp))]
    return [
        Operation(kind, each * pp + rank, micro_batch)
        for first, stop in zip(starts, [*starts[1:], num_micro_batches], strict=True)
        for each in rounds
        for micro_batch in range(first, stop)
    ]
