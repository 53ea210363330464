"""The scaling law: what the fit finds of laws that are known, against a search by brute force, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.errors import UserError
from megalite.ladder.law import HUBER_DELTA, Law, _descend, _predict, _starts, fit_law

CHINCHILLA = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
"""Hoffmann et al. 2022, equation 10."""


def loss(n: float, d: float, law: dict[str, float] = CHINCHILLA) -> float:
    return law["E"] + law["A"] / n ** law["alpha"] + law["B"] / d ** law["beta"]


def ladder(noise: float, seed: int = 0) -> tuple[list[float], list[float], list[float]]:
    rng = np.random.default_rng(seed)
    sizes = [float(n) for n in (1e8, 2e8, 4e8, 8e8) for _ in range(4)]
    lengths = [n * ratio for n, ratio in zip(sizes, (5, 10, 20, 40) * 4, strict=True)]
    return sizes, lengths, [loss(*pair) * np.exp(noise * rng.normal()) for pair in zip(sizes, lengths, strict=True)]


def test_a_law_without_noise_is_found():
    """All five numbers of Chinchilla's law to six digits, and what it says of a run a hundred times larger."""
    law = fit_law(*ladder(0.0))
    assert {name: each.value for name, each in law.numbers().items()} == pytest.approx(CHINCHILLA, rel=1e-6)
    assert law.loss(8e10, 1.6e12) == pytest.approx(loss(8e10, 1.6e12), rel=1e-9)


def test_the_optimum_is_the_least():
    """Of 6 N D FLOPs, against a search over sizes; Hoffmann's exponents are beta / (alpha + beta) and its rest."""
    law, flops = fit_law(*ladder(0.0)), 1e21
    found = law.optimum(flops)
    sizes = np.geomspace(1e7, 1e12, 200_001)
    best = sizes[np.argmin([CHINCHILLA["A"] / n**0.34 + CHINCHILLA["B"] / (flops / 6 / n) ** 0.28 for n in sizes])]
    assert found["N"].value == pytest.approx(best, rel=1e-3)
    assert found["N"].value * found["D"].value * 6 == pytest.approx(flops)
    assert found["tokens a parameter"].value == pytest.approx(found["D"].value / found["N"].value)


def test_a_law_that_nothing_determines_is_doubted():
    """Losses that are no sum of powers, or noise of 5 %; not a sound law with noise of 0.2 %."""
    assert fit_law(*ladder(0.0)).doubts() == []
    assert fit_law(*ladder(0.0005)).doubts() == []
    assert any("off it by" in each for each in fit_law(*ladder(0.05)).doubts())
    sizes, lengths, _ = ladder(0.0)
    flat = fit_law(sizes, lengths, [30.0 / d**0.1 for d in lengths])
    assert any("E is not determined" in each for each in flat.doubts())
    assert np.isfinite(flat.optimum(1e20)["N"].high)


def test_derivatives():
    """Against differences."""
    rows, n, d = _starts(np.log([3.0, 2.5, 2.2]))[::37], np.array([-1.0, 0.0, 1.0]), np.array([0.5, -0.5, 0.3])
    _, slopes = _predict(rows, n, d)
    for place in range(5):
        step = np.zeros(5)
        step[place] = 1e-6
        difference = (_predict(rows + step, n, d)[0] - _predict(rows - step, n, d)[0]) / 2e-6
        assert np.allclose(slopes[:, :, place], difference, atol=1e-8)


def test_no_start_finds_less():
    """The Huber sum of the fit is not above what a thousand random starts come to."""
    sizes, lengths, losses = ladder(0.01)
    law = fit_law(sizes, lengths, losses, num_draws=2)
    n, d, y = np.log(sizes) - law.centre[0], np.log(lengths) - law.centre[1], np.log(losses)
    rng = np.random.default_rng(1)
    starts = np.array(law.best) + rng.normal(0, 1.0, (1000, 5))
    _, costs = _descend(starts, n, d, np.broadcast_to(y, (1000, y.size)))
    size = np.abs(_predict(law.best[None], n, d)[0][0] - y)
    huber = np.where(size <= HUBER_DELTA, size**2, 2 * HUBER_DELTA * size - HUBER_DELTA**2).sum()
    assert huber <= costs.min() * (1 + 1e-3)


def test_one_run_that_went_wrong_counts_little():
    """A loss that is 10 % too high moves what is said of a larger run by less than 1 %."""
    sizes, lengths, losses = ladder(0.0)
    losses[5] *= 1.1
    assert fit_law(sizes, lengths, losses).loss(3.2e9, 6.4e10) == pytest.approx(loss(3.2e9, 6.4e10), rel=0.01)


def test_intervals_hold_what_they_say():
    """Of twenty ladders with noise of 0.5 %, a run four times the largest lies in its interval nearly always; and the
    interval is no wider than a few times the noise."""
    inside, widths = 0, []
    for seed in range(20):
        law: Law = fit_law(*ladder(0.005, seed), num_draws=60)
        came = loss(3.2e9, 3.2e10) * np.exp(0.005 * np.random.default_rng(1000 + seed).normal())
        said = law.interval(3.2e9, 3.2e10)
        inside += said.low <= came <= said.high
        widths.append((said.high - said.low) / said.value)
    assert inside >= 16  # of 95 %: fewer than 16 come once in four hundred times
    assert np.median(widths) < 0.06


@pytest.mark.parametrize("count", [(5, 3, 3), (6, 2, 3), (6, 3, 2)])
def test_too_few_runs(count):
    """Five numbers need more, of several sizes and lengths."""
    runs, sizes, lengths = count
    n, d = [float(1 + each % sizes) for each in range(runs)], [float(1 + each % lengths) for each in range(runs)]
    with pytest.raises(UserError, match="cannot be fitted"):
        fit_law(n, d, [2.0] * runs)
