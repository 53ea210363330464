"""Spikes of the loss: steps far above what came just before them, which curves of thinned means would hide.

A step is compared with the median of the steps before its stretch, in robust standard deviations (1.4826 x the median
distance from the median), so that earlier spikes do not hide later ones; a falling loss never spikes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LONGEST_STRETCH = 50
"""Steps; those before a stretch are what its own are compared with, two stretches of them."""

SHORTEST_STRETCH = 10

DEVIATIONS = 8.0
"""Robust standard deviations: normal noise crosses that once in 10^15 steps, a small batch's heavy tail at times."""

LEAST_RISE = 0.05
"""Of the median: what is less cannot be seen in a curve."""

MAX_SPIKES = 30
"""Of a run; the largest."""


@dataclass(frozen=True)
class Spike:
    """A step whose loss stands out."""

    index: int
    """Of the step in the run's columns."""
    loss: float
    before: float
    """Median of the steps right before."""


def find_spikes(loss: np.ndarray) -> list[Spike]:
    """The largest spikes of a run, by rising step; neighbouring steps are one.

    Args:
        loss: of each step, NaN where it has none.
    """
    loss = np.where(np.isfinite(loss), loss, np.nan)
    stretch = min(LONGEST_STRETCH, max(SHORTEST_STRETCH, len(loss) // 20))
    starts = np.arange(2 * stretch, len(loss), stretch)
    if not len(starts):
        return []
    past = np.stack([loss[start - 2 * stretch : start] for start in starts])
    known = (~np.isnan(past)).sum(axis=1) >= stretch
    past, starts = past[known], starts[known]
    if not len(starts):
        return []
    middle = np.nanmedian(past, axis=1)
    spread = 1.4826 * np.nanmedian(np.abs(past - middle[:, None]), axis=1)
    limit = middle + np.maximum(DEVIATIONS * spread, LEAST_RISE * np.abs(middle))
    found: list[Spike] = []
    for start, least, usual in zip(starts, limit, middle, strict=True):
        for index in start + np.flatnonzero(loss[start : start + stretch] > least):
            if found and index - found[-1].index < stretch:
                if loss[index] <= found[-1].loss:
                    continue
                found.pop()
            just_before = loss[index - SHORTEST_STRETCH : index]
            before = float(usual if np.isnan(just_before).all() else np.nanmedian(just_before))
            found.append(Spike(int(index), float(loss[index]), before))
    largest = sorted(found, key=lambda spike: spike.before - spike.loss)[:MAX_SPIKES]
    return sorted(largest, key=lambda spike: spike.index)
