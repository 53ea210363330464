"""The noise scale on a problem where it is known."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.optim.noise_scale import NoiseScale, Squares, separate, updated

DIM, SMALL, LARGE = 20, 4, 32
TRIALS = 4000
TOLERANCE = 0.05
"""Relative: over the trials, the means of |G|^2 and S have standard errors of 1 to 2 %."""


def test_linear_regression():
    """For y = x.w + e with standard normal x and e of deviation s, at a distance d from w, the gradient of one example
    is x (x.d - e): G = d and S = (n + 1) |d|^2 + n s^2. Both come out, and so does their ratio, from noisy batches of
    uneven sizes."""
    rng = np.random.default_rng(0)
    distance, deviation = rng.normal(size=DIM) / 4, 0.5
    true_gradient = float(distance @ distance)
    true_noise = (DIM + 1) * true_gradient + DIM * deviation**2
    state, found = NoiseScale(), []
    for _ in range(TRIALS):
        x = rng.normal(size=(LARGE, DIM))
        gradients = x * (x @ distance - deviation * rng.normal(size=LARGE))[:, None]
        parts = np.split(gradients, [SMALL, 3 * SMALL, 4 * SMALL, 6 * SMALL])
        squares = Squares(
            small=float(np.mean([np.sum(part.mean(0) ** 2) for part in parts])),
            inverse_small=float(np.mean([1 / len(part) for part in parts])),
            large=float(np.sum(gradients.mean(0) ** 2)),
            inverse_large=1 / LARGE,
        )
        found.append(separate(squares))
        state = updated(state, squares, smoothing=0.999)
    gradient, noise = np.mean(found, axis=0)
    assert gradient == pytest.approx(true_gradient, rel=TOLERANCE)
    assert noise == pytest.approx(true_noise, rel=TOLERANCE)
    assert state.tokens == pytest.approx(true_noise / true_gradient, rel=2 * TOLERANCE)
    assert state.num_measurements == TRIALS


def test_without_noise_there_is_none():
    """Equal gradients at both sizes: no noise, and no ratio; nor is there one while the gradient drowns in noise."""
    assert separate(Squares(4.0, 1 / 2, 4.0, 1 / 8)) == (4.0, 0.0)
    assert updated(NoiseScale(), Squares(4.0, 1 / 2, 4.0, 1 / 8), 0.9).tokens is None
    drowned = updated(NoiseScale(), Squares(8.0, 1 / 2, 1.0, 1 / 8), 0.9)
    assert drowned.tokens is None
    assert drowned.exceeds(10**9)


def test_exceeds():
    """It compares the ratio with a batch."""
    state = NoiseScale(gradient=2.0, noise=100.0)
    assert state.tokens == 50.0
    assert [state.exceeds(tokens) for tokens in (49, 50, 51)] == [True, False, False]
    assert not NoiseScale(gradient=-1.0, noise=-1.0).exceeds(1)
