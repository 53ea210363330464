"""Learning rates against formulas written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megalite.config.schema import OptimizerConfig, ScheduleConfig
from megalite.optim.schedules import learning_rate, wsd_decay_steps

PEAK, MIN, STEPS = 1e-3, 1e-4, 100

RELATIVE = 1e-12
"""The same formula in float64."""


def curve(total_steps: int = STEPS, **schedule: Any) -> list[float]:
    """The rate of steps 1 to the last; index 0 is a placeholder, so that `curve[s]` is that of step s."""
    settings = ScheduleConfig(**{"min_lr": MIN, **schedule})
    rates = [learning_rate(step, total_steps, OptimizerConfig(lr=PEAK), settings) for step in range(1, total_steps + 1)]
    return [math.nan, *rates]


def close(value: float) -> Any:
    return pytest.approx(value, rel=RELATIVE)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_warmup_counts_from_step_one(name):
    """The first update uses lr / warmup_steps, step s uses lr x s / warmup_steps, and the peak is reached exactly at
    step warmup_steps, whatever comes after."""
    rates = curve(name=name, warmup_steps=10)
    assert [rates[step] for step in (1, 2, 5, 9)] == [close(PEAK * step / 10) for step in (1, 2, 5, 9)]
    assert rates[10] == PEAK
    assert rates[11] <= PEAK


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("name", ["constant", "wsd"])
def test_no_warmup_starts_at_the_peak(name, warmup):
    """Without warmup, or with a single step of it, the first update uses the peak."""
    assert curve(name=name, warmup_steps=warmup)[1] == close(PEAK)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "cosine"},
        {"name": "linear"},
        {"name": "wsd"},
        {"name": "wsd", "decay_steps": 30, "decay_shape": "cosine"},
        {"name": "wsd", "decay_steps": 30, "decay_shape": "sqrt"},
    ],
    ids=lambda schedule: "-".join(map(str, schedule.values())),
)
def test_the_last_step_uses_min_lr(schedule, warmup):
    """Every decay ends at min_lr, exactly at the last step, and never rises after the peak."""
    rates = curve(warmup_steps=warmup, **schedule)
    assert rates[STEPS] == close(MIN)
    assert rates[STEPS - 1] > MIN
    after = rates[max(1, warmup) :]
    assert after == sorted(after, reverse=True)


def test_cosine():
    """Half a cosine from the peak at the end of warmup to min_lr at the last step."""
    rates = curve(name="cosine", warmup_steps=20)
    for step in (21, 40, 60, 99):
        assert rates[step] == close(MIN + (PEAK - MIN) * (1 + math.cos(math.pi * (step - 20) / 80)) / 2)
    assert rates[60] == close((PEAK + MIN) / 2)


def test_linear():
    """A straight line from the peak at the end of warmup to min_lr at the last step."""
    rates = curve(name="linear", warmup_steps=20)
    for step in (21, 40, 60, 99):
        assert rates[step] == close(PEAK - (PEAK - MIN) * (step - 20) / 80)


def test_constant():
    """The peak to the end; min_lr plays no part."""
    assert set(curve(name="constant", warmup_steps=20)[20:]) == {PEAK}


def test_wsd_holds_then_decays():
    """The peak until decay_steps before the end, then the decay's shape over exactly decay_steps."""
    for shape, left in (
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
        ("sqrt", lambda x: 1 - math.sqrt(x)),
    ):
        rates = curve(name="wsd", warmup_steps=10, decay_steps=25, decay_shape=shape)
        assert set(rates[10:76]) == {PEAK}
        for step in range(76, 101):
            assert rates[step] == close(MIN + (PEAK - MIN) * left((step - 75) / 25))


def test_wsd_decays_over_a_tenth_by_default():
    """Without decay_steps the decay takes a tenth of the run, and at least one step."""
    rates = curve(name="wsd", warmup_steps=10)
    assert rates[90] == PEAK
    assert rates[91] == close(PEAK - (PEAK - MIN) / 10)
    assert wsd_decay_steps(100, ScheduleConfig(name="wsd")) == 10
    assert wsd_decay_steps(5, ScheduleConfig(name="wsd")) == 1


def test_a_run_shorter_than_its_decay_or_warmup():
    """A wsd decay longer than the run begins after warmup, and a run that ends in its warmup only warms up."""
    rates = curve(name="wsd", warmup_steps=10, decay_steps=1000)
    assert rates[11] == close(PEAK - (PEAK - MIN) / 90)
    assert rates[STEPS] == close(MIN)
    assert curve(5, name="cosine", warmup_steps=10)[1:] == [close(PEAK * step / 10) for step in range(1, 6)]


def test_a_run_of_one_step():
    """One step without warmup is the last step, and one step of warmup is the peak."""
    assert curve(1, name="cosine")[1] == close(MIN)
    assert curve(1, name="cosine", warmup_steps=1)[1] == close(PEAK)


def test_min_lr_may_be_zero():
    """The default floor is 0, reached at the last step."""
    assert curve(name="cosine", min_lr=0.0)[STEPS] == 0.0
