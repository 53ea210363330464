"""How many micro-batches of a step each data-parallel rank takes, where ranks are not equally fast.

Every token weighs the same wherever it is computed, so any deal trains alike; the step ends with the last rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_out(num_micro_batches: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches of each rank, at least one, so that the last one ends as early as can be.

    Args:
        num_micro_batches: of the step, at least as many as there are ranks.
        speeds: micro-batches a second of each rank, in any unit.
    """
    assert num_micro_batches >= len(speeds), (num_micro_batches, speeds)
    counts = [1] * len(speeds)
    ends = [(2.0 / speed, rank) for rank, speed in enumerate(speeds)]  # of each rank, were it given one more
    heapq.heapify(ends)
    for _ in range(num_micro_batches - len(speeds)):
        _, rank = heapq.heappop(ends)
        counts[rank] += 1
        heapq.heappush(ends, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(counts)
