"""The scaling law of a loss over the size of a model and the length of its run, and how sure it is.

    L(N, D) = E + A / N^alpha + B / D^beta                             (Hoffmann et al. 2022, approach 3)

Fitted as there: the Huber loss of log L's residuals, log L being a log-sum-exp of e = log E, log A - alpha log N and
log B - beta log D, from many starts; here by Levenberg and Marquardt's steps for all starts at once, which come closer
to the least sum than a quasi-Newton method that stops early does (Besiroglu et al. 2024 found that in the original).

How sure: residuals are drawn anew and added to the fitted values, some hundred times, and each time the law is fitted
again. A ladder is a design of few runs, of which one cannot be left out; drawing whole runs, as is done with hundreds
of them, would often leave a law that nothing determines. Residuals are enlarged by sqrt(n / (n - 5)), since five
numbers were fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.errors import UserError

Array = np.ndarray

HUBER_DELTA = 1e-3
"""Of a residual of log L, beyond which it counts linearly (Hoffmann et al. 2022)."""

NUM_NUMBERS = 5
LEAST_RUNS, LEAST_SIZES, LEAST_LENGTHS = 6, 3, 3

NUM_DRAWS = 400
COVERAGE = 0.95
SEED = 0

MAX_STEPS = 200
GAIN_ENOUGH = 1e-12
DAMPING, MORE, LESS, MAX_DAMPING = 1e-2, 4.0, 0.3, 1e12
LEAST_DIAGONAL = 1e-12
"""So that a number on which nothing depends is damped too."""

EXPONENTS = math.log(0.02), math.log(3.0)
"""Bounds on the logarithms of alpha and beta."""
MEAN_OFF = 0.005
"""Of log L: more than seeds make of runs of some thousand steps."""
LEAST_E = 1e-3
LOG_SIZES = 0.0, 60.0
"""Bounds on log N of an optimum: a law that nothing determines has none."""
SHARES_OF_E = (0.2, 0.5, 0.8)
SHARES_OF_TERM = (0.1, 0.4)
START_EXPONENTS = (0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True)
class Interval:
    """A number, and between what it lies in 95 % of the draws."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A fitted law. Rows of `draws` are laws that other residuals would have given.

    Numbers of a row: log E, log A', log B', log alpha, log beta, with A' and B' at the mean logarithms of N and D.
    """

    best: Array
    draws: Array
    centre: tuple[float, float]
    """Means of log N and of log D."""
    residuals: Array
    """Of log L, of each run, enlarged."""

    def loss(self, num_parameters: float, num_tokens: float) -> float:
        """What it says."""
        return float(np.exp(self._logs(self.best[None], num_parameters, num_tokens))[0])

    def interval(self, num_parameters: float, num_tokens: float, *, of_a_run: bool = True) -> Interval:
        """The same with its uncertainty.

        Args:
            of_a_run: of a run, which is off the law as others are; otherwise of the law alone.
        """
        logs = self._logs(self.draws, num_parameters, num_tokens)
        if of_a_run:
            logs = logs + np.random.default_rng(SEED + 1).choice(self.residuals, logs.size)
        return _interval(self.loss(num_parameters, num_tokens), np.exp(logs))

    def numbers(self) -> dict[str, Interval]:
        """E, A, B, alpha, beta."""
        best, draws = _plain(self.best[None], self.centre), _plain(self.draws, self.centre)
        return {name: _interval(float(best[name][0]), draws[name]) for name in best}

    def doubts(self) -> list[str]:
        """Why not to rely on it, in words; empty for a law that its runs follow and determine."""
        found, numbers = [], self.numbers()
        off = float(np.abs(self.residuals).mean())
        if off > MEAN_OFF:
            found.append(f"its own runs are off it by {100 * off:.1f} % in the mean: they are too short or too unlike")
        if numbers["E"].low < LEAST_E:
            found.append("E is not determined: the losses are far above what no size or length could take away")
        lowest, highest = (math.exp(end) for end in EXPONENTS)
        for name in ("alpha", "beta"):
            if numbers[name].low <= 1.01 * lowest or numbers[name].high >= highest / 1.01:
                found.append(f"{name} is not determined: give more sizes and lengths, further apart")
        return found

    def optimum(self, flops: float) -> dict[str, Interval]:
        """N, D and tokens a parameter of the least loss for a budget of 6 N D FLOPs: all of it matrices."""
        best = _optimum(self.best[None], self.centre, flops)
        draws = _optimum(self.draws, self.centre, flops)
        return {name: _interval(float(best[name][0]), draws[name]) for name in best}

    def _logs(self, rows: Array, num_parameters: float, num_tokens: float) -> Array:
        x = np.array([math.log(num_parameters) - self.centre[0]]), np.array([math.log(num_tokens) - self.centre[1]])
        return _predict(rows, *x)[0][:, 0]


def fit_law(
    num_parameters: Sequence[float], num_tokens: Sequence[float], losses: Sequence[float], *, num_draws: int = NUM_DRAWS
) -> Law:
    """The law of some runs.

    Raises:
        UserError: there are too few runs, or they are too much alike.
    """
    require_enough(num_parameters, num_tokens)
    logs = [np.log(np.asarray(each, np.float64)) for each in (num_parameters, num_tokens, losses)]
    centre = float(logs[0].mean()), float(logs[1].mean())
    n, d, y = logs[0] - centre[0], logs[1] - centre[1], logs[2]
    starts = _starts(y)
    found, costs = _descend(starts, n, d, np.broadcast_to(y, (len(starts), y.size)))
    best = found[int(np.argmin(costs))]
    fitted = _predict(best[None], n, d)[0][0]
    enlarged = (y - fitted) * math.sqrt(y.size / (y.size - NUM_NUMBERS)) if y.size > NUM_NUMBERS else y - fitted
    enlarged = enlarged - enlarged.mean()
    drawn = np.random.default_rng(SEED).choice(enlarged, (num_draws, y.size))
    draws, _ = _descend(np.broadcast_to(best, (num_draws, best.size)).copy(), n, d, fitted + drawn)
    return Law(best, draws, centre, enlarged)


def require_enough(num_parameters: Sequence[float], num_tokens: Sequence[float]) -> None:
    """Raises UserError: so few runs, or so much alike, determine no law."""
    runs, sizes, lengths = len(num_parameters), len(set(num_parameters)), len(set(num_tokens))
    if runs < LEAST_RUNS or sizes < LEAST_SIZES or lengths < LEAST_LENGTHS:
        raise UserError(
            f"a law of five numbers cannot be fitted to {runs} runs of {sizes} sizes and {lengths} lengths; it "
            f"takes {LEAST_RUNS} runs of {LEAST_SIZES} sizes and {LEAST_LENGTHS} lengths at least, better twelve"
        )


def _starts(y: Array) -> Array:
    level = math.exp(float(y.mean()))
    rows = [
        [math.log(e * math.exp(float(y.min()))), math.log(a * level), math.log(b * level), math.log(p), math.log(q)]
        for e in SHARES_OF_E
        for a in SHARES_OF_TERM
        for b in SHARES_OF_TERM
        for p in START_EXPONENTS
        for q in START_EXPONENTS
    ]
    return np.array(rows)


def _predict(rows: Array, n: Array, d: Array) -> tuple[Array, Array]:
    """log L [rows, runs], and its derivatives by the five numbers [rows, runs, 5]."""
    e, a, b = (rows[:, place, None] for place in range(3))
    alpha, beta = (np.exp(rows[:, place, None]) for place in (3, 4))
    terms = np.stack(np.broadcast_arrays(e, a - alpha * n, b - beta * d), axis=-1)
    largest = terms.max(axis=-1, keepdims=True)
    shares = np.exp(terms - largest)
    total = shares.sum(axis=-1, keepdims=True)
    shares = shares / total
    slopes = np.stack([-alpha * n * shares[..., 1], -beta * d * shares[..., 2]], axis=-1)
    return (largest + np.log(total))[..., 0], np.concatenate([shares, slopes], axis=-1)


def _robust(residuals: Array) -> tuple[Array, Array]:
    """Numbers whose squares are twice the Huber loss, and their derivatives by the residuals."""
    size = np.abs(residuals)
    inside = size <= HUBER_DELTA
    far = np.sqrt(np.maximum(2 * HUBER_DELTA * size - HUBER_DELTA**2, HUBER_DELTA**2))
    return np.where(inside, residuals, np.sign(residuals) * far), np.where(inside, 1.0, HUBER_DELTA / far)


def _descend(rows: Array, n: Array, d: Array, targets: Array) -> tuple[Array, Array]:
    """The least sums that can be reached from each row, and what they are.

    Args:
        rows: starts [rows, 5].
        targets: log L that each is to meet [rows, runs].
    """
    rows, damping = rows.astype(np.float64), np.full(len(rows), DAMPING)
    off, jacobian, cost = _residuals(rows, n, d, targets)
    live = np.arange(len(rows))
    for _ in range(MAX_STEPS):
        normal = np.einsum("rik,ril->rkl", jacobian[live], jacobian[live])
        gradient = np.einsum("rik,ri->rk", jacobian[live], off[live])
        diagonal = np.einsum("rkk->rk", normal) + LEAST_DIAGONAL
        damped = normal + (damping[live, None] * diagonal)[:, :, None] * np.eye(NUM_NUMBERS)
        moved = rows[live] - np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
        moved[:, 3:] = np.clip(moved[:, 3:], *EXPONENTS)
        new_off, new_jacobian, new_cost = _residuals(moved, n, d, targets[live])
        is_better = new_cost < cost[live]
        is_settled = is_better & (cost[live] - new_cost < GAIN_ENOUGH * (cost[live] + GAIN_ENOUGH))
        better = live[is_better]
        rows[better], off[better], jacobian[better] = moved[is_better], new_off[is_better], new_jacobian[is_better]
        cost[better] = new_cost[is_better]
        damping[live] *= np.where(is_better, LESS, MORE)
        live = live[~is_settled & (damping[live] < MAX_DAMPING)]
        if not live.size:
            break
    return rows, cost


def _residuals(rows: Array, n: Array, d: Array, targets: Array) -> tuple[Array, Array, Array]:
    logs, slopes = _predict(rows, n, d)
    off, factor = _robust(logs - targets)
    return off, slopes * factor[:, :, None], np.einsum("ri,ri->r", off, off)


def _plain(rows: Array, centre: tuple[float, float]) -> dict[str, Array]:
    alpha, beta = np.exp(rows[:, 3]), np.exp(rows[:, 4])
    scale_a, scale_b = np.exp(rows[:, 1] + alpha * centre[0]), np.exp(rows[:, 2] + beta * centre[1])
    return {"E": np.exp(rows[:, 0]), "A": scale_a, "B": scale_b, "alpha": alpha, "beta": beta}


def _optimum(rows: Array, centre: tuple[float, float], flops: float) -> dict[str, Array]:
    plain = _plain(rows, centre)
    alpha, beta = plain["alpha"], plain["beta"]
    logs = np.log(alpha * plain["A"]) - np.log(beta * plain["B"]) + beta * math.log(flops / 6)
    sizes = np.exp(np.clip(logs / (alpha + beta), *LOG_SIZES))
    lengths = flops / 6 / sizes
    return {"N": sizes, "D": lengths, "tokens a parameter": lengths / sizes}


def _interval(value: float, draws: Array) -> Interval:
    low, high = np.quantile(draws, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(value, float(low), float(high))
