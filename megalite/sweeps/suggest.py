"""Points drawn from a space, by Optuna: at random, or where the trials so far were good (TPE).

The study lives in memory and is made anew from our own record for every question, with a seed of the sweep's and of the
trial's number. So a sweep that is resumed asks what it would have asked, and nothing of Optuna's is kept on a disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megalite.errors import UnavailableError
from megalite.sweeps.space import Dimension, Point

NEEDS = "pip install 'megalite[sweep]'"

START_TRIALS = 10
"""That TPE draws at random before it goes by what it has seen (Optuna's default)."""

EXACT_DIGITS = 15
"""Of a number on a step of its range."""

SEED_STEP = 1_000_003
"""Between the seeds of two sweeps, so that trials of neighbouring sweeps do not share any."""


class Suggestions:
    """Draws the points of a sweep.

    Args:
        dimensions: what is varied.
        method: random or tpe.
        seed: of the sweep.
        goal: min or max.

    Raises:
        UnavailableError: Optuna is not installed.
    """

    def __init__(self, dimensions: Sequence[Dimension], method: str, seed: int, goal: str):
        try:
            import optuna
        except ImportError as error:
            raise UnavailableError(f"method={method} needs Optuna: {NEEDS}, or use method=grid") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self._dimensions, self._method, self._seed = dimensions, method, seed
        self._direction = "minimize" if goal == "min" else "maximize"
        self._distributions = {each.name: self._distribution(each) for each in dimensions}

    def _distribution(self, dimension: Dimension) -> Any:
        kinds, span = self._optuna.distributions, dimension.span
        if span is None:  # Optuna takes plain values alone
            return kinds.CategoricalDistribution([json.dumps(value) for value in dimension.choices])
        if span.step is not None:  # the number of steps: Optuna takes back what is exactly on one alone
            return kinds.IntDistribution(0, (span.num_points or 1) - 1)
        if span.is_whole:
            return kinds.IntDistribution(span.low, span.high, log=span.log)
        return kinds.FloatDistribution(float(span.low), float(span.high), log=span.log)

    def draw(self, number: int, seen: Sequence[tuple[Point, float | None]]) -> Point:
        """The point of a trial.

        Args:
            number: of the trial, from 1.
            seen: the points before it with what came of them, None for what is still running. Random search asks for
                none.
        """
        optuna, seed = self._optuna, self._seed * SEED_STEP + number
        samplers = optuna.samplers
        if self._method == "random":
            sampler = samplers.RandomSampler(seed=seed)
        else:
            sampler = samplers.TPESampler(seed=seed, n_startup_trials=START_TRIALS, multivariate=False)
        study = optuna.create_study(direction=self._direction, sampler=sampler)
        worst = _worst([value for _, value in seen if value is not None], self._direction)
        for point, value in seen if self._method == "tpe" else ():
            study.add_trial(
                optuna.trial.create_trial(
                    params=self._coded(point),
                    distributions=self._distributions,
                    value=worst if value is None else value,
                )
            )
        asked = study.ask(self._distributions)
        return {each.name: _decoded(each, asked.params[each.name]) for each in self._dimensions}

    def _coded(self, point: Point) -> dict[str, Any]:
        return {each.name: _coded(each, point[each.name]) for each in self._dimensions}


def _coded(dimension: Dimension, value: Any) -> Any:
    """A value as Optuna has it."""
    span = dimension.span
    if span is None:
        return json.dumps(value)
    return value if span.step is None else round((value - span.low) / span.step)


def _decoded(dimension: Dimension, coded: Any) -> Any:
    span = dimension.span
    if span is None:
        return json.loads(coded)
    return span.rounded(coded) if span.step is None else span.rounded(span.low + coded * span.step, EXACT_DIGITS)


def _worst(values: Sequence[float], direction: str) -> float:
    """What stands for a trial that still runs, or that failed: the worst seen, so that others keep away from it."""
    if not values:
        return 0.0
    return max(values) if direction == "minimize" else min(values)
