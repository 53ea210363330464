"""Learning rates against torch's and transformers' own schedulers.

Those count steps from 0 and set the rate for the next one, so their index for our step s, counted from 1, is s where
the first step is already one step past the start, and s - 1 where it is the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from megalite.config.schema import OptimizerConfig, ScheduleConfig
from megalite.optim.schedules import StepMeasures, learning_rate

PEAK, MIN, WARMUP, STEPS = 3e-3, 3e-4, 10, 100

RELATIVE = 1e-9
"""Torch multiplies a rate step by step where we take a power: some hundred roundings in float64."""


def ours(total: int = STEPS, **schedule: Any) -> list[float]:
    """Rates of steps 1 to the last."""
    settings = ScheduleConfig(**schedule)
    return [learning_rate(step, total, OptimizerConfig(lr=PEAK), settings) for step in range(1, total + 1)]


def theirs(make: Callable[[torch.optim.Optimizer], Any], count: int, *, base: float = PEAK) -> list[float]:
    """Rates at their indices 0 to `count`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base, momentum=0.9)
    scheduler = make(optimizer)
    rates = []
    for _ in range(count + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=RELATIVE, abs=PEAK * RELATIVE)


TRANSFORMERS = {
    "constant": ({"name": "constant"}, transformers.get_constant_schedule_with_warmup, {}),
    "linear": ({"name": "linear"}, transformers.get_linear_schedule_with_warmup, {"num_training_steps": STEPS}),
    "cosine": ({"name": "cosine"}, transformers.get_cosine_schedule_with_warmup, {"num_training_steps": STEPS}),
    "polynomial": (
        {"name": "polynomial", "power": 3.0, "min_lr": MIN},
        transformers.get_polynomial_decay_schedule_with_warmup,
        {"num_training_steps": STEPS, "lr_end": MIN, "power": 3.0},
    ),
    "inverse_sqrt": ({"name": "inverse_sqrt"}, transformers.get_inverse_sqrt_schedule, {}),
    "inverse_sqrt with a timescale": (
        {"name": "inverse_sqrt", "timescale_steps": 33},
        transformers.get_inverse_sqrt_schedule,
        {"timescale": 33},
    ),
    "wsd": (
        {"name": "wsd", "decay_steps": 30, "min_lr": MIN, "start_lr": MIN},
        transformers.get_wsd_schedule,
        {"num_decay_steps": 30, "num_stable_steps": 60, "decay_type": "linear", "min_lr_ratio": MIN / PEAK},
    ),
    "wsd by cosine": (
        {"name": "wsd", "decay_steps": 30, "min_lr": MIN, "start_lr": MIN, "decay_shape": "cosine"},
        transformers.get_wsd_schedule,
        {"num_decay_steps": 30, "num_stable_steps": 60, "decay_type": "cosine", "min_lr_ratio": MIN / PEAK},
    ),
    "wsd by 1 - sqrt": (
        {"name": "wsd", "decay_steps": 30, "min_lr": MIN, "start_lr": MIN, "decay_shape": "sqrt"},
        transformers.get_wsd_schedule,
        {"num_decay_steps": 30, "num_stable_steps": 60, "decay_type": "1-sqrt", "min_lr_ratio": MIN / PEAK},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    """With a linear warmup, our step s is transformers' index s. Its wsd rises from the floor, not from 0."""
    schedule, make, options = TRANSFORMERS[name]
    expected = theirs(lambda optimizer: make(optimizer, num_warmup_steps=WARMUP, **options), STEPS)
    assert ours(warmup_steps=WARMUP, **schedule) == close(expected[1:])


class TestTorch:
    def test_exponential(self):
        """gamma over period_steps, continuously."""
        expected = theirs(lambda it: lr_scheduler.ExponentialLR(it, 0.5 ** (1 / 20)), STEPS)
        assert ours(name="exponential", gamma=0.5, period_steps=20) == close(expected[1:])

    def test_step(self):
        """The first period_steps steps use the peak."""
        expected = theirs(lambda it: lr_scheduler.StepLR(it, 15, 0.3), STEPS)
        assert ours(name="step", gamma=0.3, period_steps=15) == close(expected[:-1])

    def test_milestones(self):
        """A milestone is the last step before a drop."""
        expected = theirs(lambda it: lr_scheduler.MultiStepLR(it, [30, 80], 0.1), STEPS)
        assert ours(name="step", gamma=0.1, milestones=(30, 80)) == close(expected[:-1])

    @pytest.mark.parametrize(("gamma", "mode"), [(1.0, "triangular"), (0.5, "triangular2")])
    def test_cyclical(self, gamma, mode):
        expected = theirs(lambda it: lr_scheduler.CyclicLR(it, MIN, PEAK, step_size_up=10, mode=mode), STEPS)
        assert ours(name="cyclical", min_lr=MIN, gamma=gamma, period_steps=20) == close(expected[1:])

    def test_cyclical_by_cosine(self):
        """Warm restarts."""
        expected = theirs(lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 20, eta_min=MIN), STEPS)
        found = ours(name="cyclical", min_lr=MIN, gamma=1.0, period_steps=20, cycle_shape="cosine")
        assert found == close(expected[1:])

    def test_one_cycle(self):
        """The first step is at the foot, the one at the end of warmup at the peak."""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, PEAK, STEPS, pct_start=0.3, div_factor=25, final_div_factor=10, anneal_strategy="cos"
        )
        expected = [optimizer.param_groups[0]["lr"]]
        for _ in range(STEPS - 1):
            optimizer.step()
            scheduler.step()
            expected.append(optimizer.param_groups[0]["lr"])
        found = ours(name="one_cycle", warmup_steps=30, start_lr=PEAK / 25, min_lr=PEAK / 250)
        assert found == close(expected)

    def test_piecewise(self):
        """SequentialLR of drops, a straight line and half a cosine."""

        def make(it: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
            parts = [
                lr_scheduler.StepLR(it, 10, 0.5),
                lr_scheduler.LinearLR(it, 1.0, MIN / PEAK, 30),
                lr_scheduler.ExponentialLR(it, 0.9),
            ]
            return lr_scheduler.SequentialLR(it, parts, [40, 71])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own use of a deprecated argument
            expected = theirs(make, STEPS)
        phases = [
            {"name": "step", "period_steps": 10, "gamma": 0.5, "until_step": 40},
            {"name": "constant", "lr": PEAK, "until_step": 41},
            {"name": "linear", "lr": PEAK, "min_lr": MIN, "until_step": 71},
            {"name": "constant", "lr": PEAK, "until_step": 72},
            {"name": "exponential", "lr": PEAK, "gamma": 0.9, "period_steps": 1},
        ]
        assert ours(name="piecewise", phases=phases) == close(expected[:-1])


def test_constant_with_cooldown_is_wsd():
    """constant with decay_steps is the curve of wsd, and without them never falls."""
    options = {"warmup_steps": WARMUP, "decay_steps": 25, "decay_shape": "sqrt", "min_lr": MIN}
    assert ours(name="constant", **options) == ours(name="wsd", **options)
    assert set(ours(name="constant")) == {PEAK}


def test_a_decay_branched_off_is_the_longer_run_until_there():
    """wsd before its decay does not depend on the length of the run: a run of any length has the same stable rates."""
    short, long = (ours(total, name="wsd", warmup_steps=WARMUP, decay_steps=20) for total in (60, 1000))
    assert short[:40] == long[:40]
    assert short[40] < long[40]


@pytest.mark.parametrize("name", ["exponential", "step", "inverse_sqrt", "plateau"])
def test_schedules_without_an_end_stop_at_min_lr(name):
    """min_lr is the floor of those that would fall for ever."""
    options = {"inverse_sqrt": {"timescale_steps": 1}, "plateau": {}}.get(name, {"period_steps": 3, "gamma": 0.1})
    settings = ScheduleConfig(name=name, min_lr=PEAK / 5, **options)
    assert learning_rate(90, STEPS, OptimizerConfig(lr=PEAK), settings, StepMeasures(num_cuts=9)) == PEAK / 5


def test_warmup_from_a_rate():
    """Warmup rises from start_lr in a straight line."""
    rates = ours(name="constant", warmup_steps=4, start_lr=PEAK / 2)
    assert rates[:5] == close([PEAK * share for share in (0.625, 0.75, 0.875, 1.0, 1.0)])
