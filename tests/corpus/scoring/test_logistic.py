"""Logistic regression: the minimum is one, the measures are what they are called."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.corpus.scoring.logistic import area_under_curve, calibrate, log_losses, minimize, sigmoid


def test_minimize_solves_a_quadratic():
    """Ill-conditioned and with a known solution."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(30, 30)))
    matrix = basis * np.logspace(-2, 2, 30) @ basis.T
    solution = rng.normal(size=30)
    found = minimize(
        lambda x: (0.5 * (x - solution) @ matrix @ (x - solution), matrix @ (x - solution)),
        np.zeros(30),
        tolerance=1e-10,
    )
    assert np.allclose(found, solution, atol=1e-7)


def test_log_losses_are_those_of_the_definition():
    """-log p and -log(1 - p), and no overflow far out."""
    logits = np.array([-3.0, 0.0, 2.5, 2.5])
    labels = np.array([0.0, 1.0, 1.0, 0.0])
    probability = sigmoid(logits)
    assert np.allclose(log_losses(logits, labels), -np.log(np.where(labels == 1, probability, 1 - probability)))
    assert log_losses(np.array([1e4]), np.array([0.0]))[0] == 1e4
    assert sigmoid(np.array([-np.inf, -1e4, 1e4])).tolist() == [0.0, 0.0, 1.0]


@given(scores=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=30))
@settings(max_examples=200, deadline=None)
def test_area_under_curve_counts_pairs(scores):
    """Equal to counting all pairs, ties as half."""
    values, labels = np.array([score for score, _ in scores], float), np.array([float(label) for _, label in scores])
    good, bad = values[labels == 1], values[labels == 0]
    if good.size and bad.size:
        expected = np.mean([(a > b) + 0.5 * (a == b) for a in good for b in bad])
        assert area_under_curve(values, labels) == pytest.approx(expected)


def test_calibration_finds_the_line():
    """Labels drawn with a known slope and offset give them back; reversed logits give a negative slope."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=100_000) / 50
    labels = (rng.random(logits.size) < sigmoid(100 * logits)).astype(float)
    slope, offset = calibrate(logits, labels)
    assert slope == pytest.approx(100, rel=0.03)
    assert offset == pytest.approx(0, abs=0.03)
    assert calibrate(-logits, labels)[0] < 0


def test_calibration_stays_finite_when_the_classes_do_not_overlap():
    """Platt's drawn-in labels."""
    logits = np.array([-2.0, -1.0, 1.0, 2.0])
    slope, offset = calibrate(logits, np.array([0.0, 0.0, 1.0, 1.0]))
    assert 0 < slope < 10
    assert abs(offset) < 1e-6
