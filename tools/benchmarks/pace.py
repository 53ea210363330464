"""How quick the machine is at the moment: what a benchmark of minutes asks before and after each of its parts.

Virtual machines have neighbours: one that multiplies a fifth slower than ten minutes ago is another machine than the
one that was calibrated, and a comparison of the two says nothing of what is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

STEADY = 0.08
"""By how much the pace may differ within one moment. Calls one behind the other differ by 0.03 (AMD Zen 4, virtual)."""


def pace(seconds: float = 1.5) -> float:
    """Seconds of a fixed piece of work on all cores: products, and passes over 128 MB, a fifth of it or so.

    The median of as many as `seconds` have room for.
    """
    left, right = torch.ones(768, 768), torch.ones(768, 768)
    long = torch.ones(32 * 2**20)
    taken = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(8):
            torch.mm(left, right)
        long.add_(1.0)
        taken.append(time.perf_counter() - began)
    return median(taken)


class Moment:
    """A time in which the machine keeps its pace: from when it is made, as long as `lasts` says so.

    Args:
        measure: the pace now, in seconds of a fixed piece of work
        allowed: by which share it may differ from that of the beginning
    """

    def __init__(self, measure: Callable[[], float] = pace, allowed: float = STEADY) -> None:
        self._measure = measure
        self._allowed = allowed
        self._began = measure()

    def lasts(self) -> bool:
        """Whether the pace is still that of the beginning."""
        return abs(self._measure() / self._began - 1) <= self._allowed
