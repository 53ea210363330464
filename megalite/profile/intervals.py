"""Arithmetic of sets of intervals, the whole of a trace's sums.

A set is a float array `[n, 2]` of starts and stops, ascending and without overlap, as `union` makes it. Stops do not
belong to their intervals, so two that touch are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]

NONE: Intervals = np.empty((0, 2))
"""The empty set."""


def union(pieces: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """Any intervals, overlapping and unordered, as a set; empty ones are left out."""
    found = np.asarray(pieces if isinstance(pieces, np.ndarray) else list(pieces), dtype=np.float64).reshape(-1, 2)
    found = found[found[:, 1] > found[:, 0]]
    if not len(found):
        return NONE
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    begins = np.concatenate(([True], found[1:, 0] > reached[:-1]))
    ends = np.concatenate((begins[1:], [True]))
    return np.stack((found[begins, 0], reached[ends]), axis=1)


def both(a: Intervals, b: Intervals) -> Intervals:
    """What is in both sets."""
    return _combined(a, b, np.logical_and)


def minus(a: Intervals, b: Intervals) -> Intervals:
    """What is in the first set and not in the second."""
    return _combined(a, b, lambda in_a, in_b: in_a & ~in_b)


def length(a: Intervals) -> float:
    """How long a set's intervals are together."""
    return float((a[:, 1] - a[:, 0]).sum())


def contains(a: Intervals, points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each point is in the set."""
    if not len(a):
        return np.zeros(len(points), dtype=bool)
    place = np.searchsorted(a[:, 0], points, side="right") - 1
    return (place >= 0) & (points < a[np.maximum(place, 0), 1])


def _combined(a: Intervals, b: Intervals, is_in: Callable[[NDArray, NDArray], NDArray]) -> Intervals:
    edges = np.unique(np.concatenate((a.ravel(), b.ravel())))
    starts, stops = edges[:-1], edges[1:]
    chosen = is_in(contains(a, starts), contains(b, starts))
    return union(np.stack((starts[chosen], stops[chosen]), axis=1))
