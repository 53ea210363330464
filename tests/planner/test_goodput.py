"""What failures take, against a run that fails by dice."""

from __future__ import annotations

import random

import pytest

from megalite.planner.goodput import Reliability, reliability


def simulated(known: Reliability, interval: float, seed: int, intervals: int = 20_000) -> float:
    """Share of the time that is kept over many intervals, with failures at random, in saves and restarts too."""
    dice, now, kept = random.Random(seed), 0.0, 0.0
    fails_in = dice.expovariate(1 / known.between_failures)
    for _ in range(intervals):
        left = interval + known.save
        while fails_in < left:  # begin again from the last checkpoint, once a restart has come through
            now += fails_in
            fails_in, left = dice.expovariate(1 / known.between_failures), known.restart + interval + known.save
        now, fails_in, kept = now + left, fails_in - left, kept + interval
    return kept / now


@pytest.mark.parametrize(
    ("mean", "save", "restart", "interval"), [(3600, 30, 300, 600), (600, 20, 120, 300), (9e4, 5, 60, 900)]
)
def test_against_dice(mean: float, save: float, restart: float, interval: float):
    known = Reliability(mean, save, restart)
    assert known.goodput(interval) == pytest.approx(simulated(known, interval, seed=1), rel=0.02)


@pytest.mark.parametrize("mean", [1e3, 1e5, 1e7])
def test_the_best_interval(mean: float):
    """No other keeps more, and where failures are rare it is Young's: the root of twice a save and the mean."""
    known = Reliability(mean, 10.0, 300.0)
    best = known.best_interval()
    assert all(known.goodput(best) >= known.goodput(best * factor) for factor in (0.2, 0.9, 1.1, 5.0))
    if mean >= 1e5:
        assert best == pytest.approx((2 * 10.0 * mean) ** 0.5, rel=0.03)


def test_of_a_cluster():
    """16,384 ranks on nodes of eight that fail every 500 days fail six times a hundred hours together."""
    known = reliability(1 / 500, ranks=16384, ranks_per_node=8, save=5, restart=300)
    assert known.between_failures == pytest.approx(500 * 86400 / 2048)
    assert known.goodput(1e9) == 0.0
