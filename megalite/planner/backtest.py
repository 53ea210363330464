"""The planner's clock against published runs: four constants for each machine and generation of software.

Constants are those under which the logarithms of predicted over measured seconds have the least sum of squares, and
which stay near what such machines usually do: with few runs and four numbers, a run would else be met by a machine that
cannot be. Each run is also predicted by constants that were fitted without it; some were never fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from megalite.planner.machines import Constants, Machine, load_machine
from megalite.planner.published import RUNS, UNSEEN
from megalite.planner.published_run import PublishedRun
from megalite.planner.seconds import step_time

USUAL = Constants(products=0.7, passes=1.0, links=0.75, overhead=20e-6)
NEARNESS = 0.05
"""Weight of being near to what is usual: of a constant that is twice of it or half, over a run that takes twice as
long."""


@dataclass(frozen=True)
class Backtest:
    """A run predicted."""

    run: PublishedRun
    fitted: float
    """Seconds by constants of all runs of its software."""
    left_out: float
    """Seconds by constants of the others."""

    @property
    def error(self) -> float:
        """Of `fitted`, relative."""
        return self.fitted / self.run.seconds - 1.0

    @property
    def error_left_out(self) -> float:
        """Of `left_out`, relative."""
        return self.left_out / self.run.seconds - 1.0


def backtest() -> dict[tuple[str, str], list[Backtest]]:
    """All published runs, by machine and software, with the constants of the machines' files; behind them those that no
    constant has seen."""
    return {key: _judge(runs, load_machine(key[0])) for key, runs in _by_software().items()}


def _judge(runs: Sequence[PublishedRun], machine: Machine) -> list[Backtest]:
    """Runs of one machine and software. Constants without a run are looked for from those with it, which saves time and
    changes nothing (a test)."""
    stated, whole = machine.run_by(runs[0].software), fit(runs, machine)
    found = []
    for run in runs:
        others = fit([each for each in runs if each is not run], machine, near=whole)
        found.append(Backtest(run, predict(run, stated), predict(run, _with(machine, others))))
    unseen = [each for each in UNSEEN if (each.machine, each.software) == (runs[0].machine, runs[0].software)]
    return found + [Backtest(run, predict(run, stated), predict(run, _with(machine, whole))) for run in unseen]


def fit_all() -> dict[tuple[str, str], Constants]:
    """What the constants of all runs of each software are, by machine and software."""
    return {key: fit(runs, load_machine(key[0])) for key, runs in _by_software().items()}


def _by_software() -> dict[tuple[str, str], list[PublishedRun]]:
    """All published runs, by machine and software."""
    found: dict[tuple[str, str], list[PublishedRun]] = {}
    for run in RUNS:
        found.setdefault((run.machine, run.software), []).append(run)
    return found


def median_error(tests: Sequence[Backtest]) -> float:
    """Of runs that were left out, without their signs."""
    return median(abs(each.error_left_out) for each in tests)


def predict(run: PublishedRun, machine: Machine) -> float:
    """Seconds of a step of a run."""
    return step_time(run.config, run.plan, run.on(machine), run.practice).seconds


def fit(runs: Sequence[PublishedRun], machine: Machine, near: Constants = USUAL) -> Constants:
    """The constants of some runs on a machine.

    Args:
        near: where to begin to look.
    """
    usual = np.log(list(USUAL.model_dump().values()))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        changed = _with(machine, _constants(logarithms))
        off = [np.log(predict(run, changed) / run.seconds) for run in runs]
        return np.concatenate([off, NEARNESS * (logarithms - usual)])

    return _constants(_least_squares(residuals, np.log(list(near.model_dump().values()))))


def _constants(logarithms: np.ndarray) -> Constants:
    return Constants(**dict(zip(Constants.model_fields, np.exp(logarithms).tolist(), strict=True)))


def _with(machine: Machine, constants: Constants) -> Machine:
    return machine.model_copy(update={"constants": constants})


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """By Levenberg and Marquardt's steps, with differences for derivatives."""
    damping, off = 1e-3, residuals(x)
    for _ in range(50):
        columns = [(residuals(x + STEP * unit) - off) / STEP for unit in np.eye(x.size)]
        jacobian = np.stack(columns, axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ off
        while damping < 1e9:
            moved = x - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            after = residuals(moved)
            if after @ after < off @ off:
                break
            damping *= 5
        else:
            return x
        gain, x, off, damping = off @ off - after @ after, moved, after, damping / 5
        if gain < ENOUGH:
            return x
    return x


STEP = 1e-5
"""Of a logarithm."""
ENOUGH = 1e-7
"""What the sum of squares must fall by in a step, so that another one follows: a thirtieth of a percent of one run."""
