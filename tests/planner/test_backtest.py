"""The planner's clock against published runs."""

from __future__ import annotations

import pytest

from megalite.config.plan import derive_dp
from megalite.planner.backtest import backtest, fit_all, median_error
from megalite.planner.machines import load_machine
from megalite.planner.published import RUNS

BEYOND = {("GPT 16B", "megatron-core-0.8")}
"""Of 14 runs the one that is off by more than a tenth when it is left out: its table says neither the micro-batch nor
what was hidden, and no other run of its software has tp on one node without a pipeline."""


def test_published_runs():
    """Left out of what predicts it, a run is met within 4 % in the median, and within 10 % but for one; constants
    of the machines' files are those that fit."""
    found = backtest()
    every = [each for tests in found.values() for each in tests]
    assert len(every) == len(RUNS) == 14
    assert median_error(every) <= 0.04
    beyond = {(each.run.name, each.run.software) for each in every if abs(each.error_left_out) > 0.10}
    assert beyond == BEYOND
    assert max(abs(each.error) for each in every) < 0.085
    for (machine, software), constants in fit_all().items():
        stated = load_machine(machine).others[software].model_dump()
        assert stated == pytest.approx(constants.model_dump(), rel=0.02)


def test_runs_are_as_published():
    """Model sizes by their names, and layouts that multiply to their GPUs."""
    sizes = {"1.7B": 1.7e9, "7.5B": 7.5e9, "39.1B": 39.1e9, "145.6B": 145.6e9, "529.6B": 529.6e9, "22B": 22e9}
    sizes |= {"530B": 530e9, "16B": 16e9, "70B": 70e9, "177B": 177e9, "462B": 462e9}
    for run in RUNS:
        assert run.plan.num_parameters == pytest.approx(sizes[run.name.split()[1]], rel=0.06), run.name
        parallel = run.config.parallel
        assert parallel.tp * parallel.pp * derive_dp(run.config, run.world_size) == run.world_size
        assert run.plan.grad_accum_steps >= 1
