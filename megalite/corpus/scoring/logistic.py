"""Logistic regression: its loss, the optimum of it, calibration, and the measure of how well classes are told apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
"""Parameters, float64 [n], to the loss there and its gradient."""

HISTORY = 10
"""Steps that L-BFGS remembers."""

SUFFICIENT_DECREASE = 1e-4
"""Part of the decrease promised by the slope that a step must bring (Armijo; Nocedal and Wright 2006, section 3.1)."""

MAX_STEPS = 1000


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-logit)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


def log_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """-log of the probability given to each label, in nats.

    Args:
        logits: float64 [texts].
        labels: float64 [texts], 1 or 0, or a probability between.
    """
    return np.logaddexp(0.0, logits) - labels * logits


def dot(one: np.ndarray, other: np.ndarray) -> float:
    """Sum of products, in one thread: BLAS would round otherwise on a machine with another number of cores."""
    return float(np.einsum("i,i->", one, other))


def class_weights(labels: np.ndarray) -> np.ndarray:
    """Weights that sum to 1/2 over each of the classes 1 and 0, float64 [texts]."""
    positive = labels == 1
    return np.where(positive, 0.5 / positive.sum(), 0.5 / (~positive).sum())


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a text of label 1 scores above one of label 0; ties count half (Mann and Whitney 1947)."""
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(sizes) - (sizes - 1) / 2  # from 1; equal scores share the middle of theirs
    positive = labels == 1
    num_positive = int(positive.sum())
    num_pairs = num_positive * (labels.size - num_positive)
    return float((rank[group[positive]].sum() - num_positive * (num_positive + 1) / 2) / num_pairs)


def calibrate(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Slope and offset that turn logits into those of probabilities for even odds (Platt 1999).

    The labels are drawn in from 0 and 1 as by one more text on each side, so that classes that do not overlap do not
    ask for an infinite slope.

    Args:
        logits: float64 [texts].
        labels: float64 [texts], 1 or 0, some of each.
    """
    weights = class_weights(labels)
    num_positive = labels.sum()
    drawn_in = np.where(labels == 1, (num_positive + 1) / (num_positive + 2), 1 / (labels.size - num_positive + 2))
    scale = max(float(np.abs(logits).max()), 1e-30)  # so that both parameters are about as steep

    def loss(line: np.ndarray) -> tuple[float, np.ndarray]:
        outputs = line[0] * logits / scale + line[1]
        slopes = weights * (sigmoid(outputs) - drawn_in)
        return dot(weights, log_losses(outputs, drawn_in)), np.array([dot(slopes, logits) / scale, slopes.sum()])

    slope, offset = minimize(loss, np.zeros(2), tolerance=1e-9)
    return float(slope / scale), float(offset)


def minimize(objective: Objective, start: np.ndarray, *, tolerance: float) -> np.ndarray:
    """Minimum of a smooth convex function, by L-BFGS with a backtracking line search (Liu and Nocedal 1989).

    Args:
        objective: the function.
        start: float64 [n], where to begin.
        tolerance: end when no part of the gradient is larger.
    """
    point = start
    value, gradient = objective(point)
    steps: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=HISTORY)
    for _ in range(MAX_STEPS):
        if np.abs(gradient).max() <= tolerance:
            break
        direction = -_apply_inverse_hessian(gradient, steps)
        slope = dot(gradient, direction)
        length = 1.0 if steps else min(1.0, 1.0 / float(np.abs(gradient).sum()))
        while True:
            moved = point + length * direction
            moved_value, moved_gradient = objective(moved)
            if moved_value <= value + SUFFICIENT_DECREASE * length * slope:
                break
            length /= 2
            if length < 1e-12:
                return point  # rounding hides any further decrease
        step, bend = moved - point, moved_gradient - gradient
        curvature = dot(step, bend)
        if curvature > 0.0:
            steps.append((step, bend, curvature))
        point, value, gradient = moved, moved_value, moved_gradient
    return point


def _apply_inverse_hessian(gradient: np.ndarray, steps: deque[tuple[np.ndarray, np.ndarray, float]]) -> np.ndarray:
    """The approximation of the inverse Hessian that the last steps give, times the gradient: the two-loop recursion."""
    result = gradient.copy()
    scratch = np.empty_like(result)
    shares = []
    for step, bend, curvature in reversed(steps):
        share = dot(step, result) / curvature
        result -= np.multiply(bend, share, out=scratch)
        shares.append(share)
    if steps:
        step, bend, curvature = steps[-1]
        result *= curvature / dot(bend, bend)
    for (step, bend, curvature), share in zip(steps, reversed(shares), strict=True):
        result += np.multiply(step, share - dot(bend, result) / curvature, out=scratch)
    return result
