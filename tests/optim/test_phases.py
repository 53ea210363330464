"""Schedules one after another, by powers of the step, by what is measured, and with the batch: by their formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.config.length import fill_schedule
from megalite.config.length_stages import length_stages, plan_stage
from megalite.config.plan import RunPlan, make_plan
from megalite.config.schema import Config, OptimizerConfig, ScheduleConfig
from megalite.config.sections.health import SpikesConfig
from megalite.config.validate import validate
from megalite.engine.protocol import StepResult
from megalite.optim.groups import Pacing
from megalite.optim.noise_scale import NoiseScale
from megalite.optim.schedules import StepMeasures, decay_scale, learning_rate, shape_at
from megalite.train.components.adaptive_control import AdaptiveControl
from megalite.train.components.component import Step
from megalite.train.components.spikes import SpikeGuard
from tests.kit.train import tiny_config

PEAK, STEPS = 1e-3, 100


def rates(measured: StepMeasures | None = None, **schedule: Any) -> list[float]:
    """Of steps 1 to the last."""
    settings, of = ScheduleConfig(**schedule), OptimizerConfig(lr=PEAK)
    return [learning_rate(step, STEPS, of, settings, measured or StepMeasures()) for step in range(1, STEPS + 1)]


ALONE = [
    {"name": "constant"},
    {"name": "linear", "warmup_steps": 4},
    {"name": "cosine", "min_lr": 1e-4},
    {"name": "polynomial", "power": 3.0},
    {"name": "exponential", "gamma": 0.5, "period_steps": 7},
    {"name": "step", "gamma": 0.5, "milestones": [5, 20]},
    {"name": "inverse_sqrt", "timescale_steps": 6},
    {"name": "power", "timescale_steps": 6, "decay_steps": 10},
    {"name": "wsd", "decay_steps": 8, "decay_shape": "sqrt", "warmup_steps": 3},
    {"name": "cyclical", "period_steps": 10, "gamma": 0.9},
    {"name": "one_cycle", "warmup_steps": 9, "start_lr": 1e-5},
    {"name": "plateau", "gamma": 0.5},
]


@pytest.mark.parametrize("shape", ALONE, ids=lambda shape: shape["name"])
def test_any_schedule_is_a_phase(shape):
    """Between two others, a phase of 40 steps is a run of 40 steps, by its own peak or by where the former ended."""
    first, last = {"name": "linear", "min_lr": PEAK / 2, "until_step": 30}, {"name": "constant"}
    measured = StepMeasures(num_cuts=1)
    for own, peak in (({"lr": 2e-3}, 2e-3), ({}, PEAK / 2)):
        if shape.get("min_lr", 0.0) > peak:
            continue
        found = rates(
            measured, name="piecewise", phases=[first, {**shape, **own, "until_step": 70}, {**last, "lr": PEAK}]
        )
        settings, of = ScheduleConfig(**shape), OptimizerConfig(lr=peak)
        alone = [learning_rate(step, 40, of, settings, measured) for step in range(1, 41)]
        assert found[30:70] == pytest.approx(alone, rel=1e-12)
        assert found[:30] == pytest.approx([PEAK * (1 - step / 60) for step in range(1, 31)], rel=1e-12)
        assert set(found[70:]) == {PEAK}


def test_phases_in_tokens_and_shares():
    """Ends and warmups come out in steps, whatever they were given in: a step has 128 tokens."""
    phases = [
        {"name": "constant", "until_tokens": 1281, "warmup_tokens": 300},
        {"name": "linear", "until_share": 0.5, "min_lr": 1e-4, "warmup_fraction": 0.25},
        {"name": "cosine", "warmup_tokens": 129},
    ]
    config = tiny_config(schedule={"name": "piecewise", "phases": phases, "min_lr": 0.0, "warmup_steps": 0})
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 60})})
    filled = fill_schedule(config).phases
    assert [(phase.until_step, phase.warmup_steps) for phase in filled] == [(11, 3), (30, round(19 / 4)), (None, 2)]
    assert [shape_at(step, fill_schedule(config)).name for step in (1, 11, 12, 30, 31, 60)] == [
        *("constant", "constant", "linear", "linear", "cosine", "cosine")
    ]


def test_power():
    """The peak until the timescale, then steps^-exponent; a final decay is a share of that."""
    found = rates(name="power", timescale_steps=20, exponent=0.51)
    assert found == pytest.approx([PEAK * min(1.0, (20 / step) ** 0.51) for step in range(1, STEPS + 1)], rel=1e-12)
    cooled = rates(name="power", timescale_steps=20, decay_steps=10)
    assert cooled[:90] == found[:90]
    assert cooled[90:] == pytest.approx([found[89 + k] * (1 - k / 10) for k in range(1, 11)], rel=1e-12)


@pytest.mark.parametrize(("kind", "exponent"), [("none", 0.0), ("linear", 1.0), ("sqrt", 0.5)])
def test_rates_follow_the_batch(kind, exponent):
    """In a ramp from 2 to 8 sequences the rate is what its schedule says, times (size / 8)^exponent."""
    ramp = {"start_size": 2, "samples": 12, "increment": 2}
    schedule = {"name": "cosine", "warmup_steps": 3, "scale_with_batch": kind}
    config = tiny_config(batch={"ramp": ramp}, schedule=schedule)
    control = controlled(config)
    sizes = make_plan(config, 1).batch_sizes
    assert {sizes.size(step) for step in range(1, 21)} == {2, 4, 6, 8}
    for step in range(1, 21):
        alone = learning_rate(step, 20, config.optimizer, config.schedule)
        assert control.learning_rate(step) == pytest.approx(alone * (sizes.size(step) / 8) ** exponent, rel=1e-12)


def controlled(config: Config, plan: RunPlan | None = None) -> Any:
    """The component that sets rates, on an engine that only listens."""
    engine = SimpleNamespace(loss_scaling=dict, set_loss_scaling=lambda state: None, pacing=None)
    engine.averaging, engine.set_averaging = dict, lambda state: None
    engine.set_pacing = lambda pacing: setattr(engine, "pacing", pacing)
    engine.observe_gradients = lambda observer: None
    engine.stage = SimpleNamespace(parameters=list)
    recorder = SimpleNamespace(event=lambda *args, **kwargs: None)
    plan = plan or make_plan(config, 1)
    control = AdaptiveControl(config, plan, engine=engine, axes=None, device=None, recorder=recorder)
    control.engine = engine
    return control


def test_the_noise_anneals_the_rate():
    """lr / (1 + noise scale / tokens of the step) (McCandlish et al. 2018); lr before there is a measurement."""
    config = tiny_config(batch={"noise_scale": {"every": 1}}, schedule={"name": "noise_scale", "warmup_steps": 0})
    control = controlled(config)
    assert control.learning_rate(5) == config.optimizer.lr
    control.load_state({"noise_scale": vars(NoiseScale(gradient=0.5, noise=96.0, num_measurements=4))})
    assert control.learning_rate(5) == max(2e-4, config.optimizer.lr / (1 + 192.0 / 128))


def test_plateau_counts_within_its_phase():
    """Validations before the phase, and after it, change nothing; its cuts are in the state."""
    plateau = {"name": "plateau", "gamma": 0.5, "plateau": {"patience": 0}, "lr": PEAK, "until_step": 14}
    phases = [{"name": "constant", "until_step": 8}, plateau, {"name": "constant", "lr": 1e-4}]
    control = controlled(
        tiny_config(schedule={"name": "piecewise", "phases": phases, "min_lr": 0.0, "warmup_steps": 0})
    )
    for step in (2, 4, 6):
        control.note_validation(step, 1.0)
    assert "plateau" not in control.state()
    for step in (10, 12):
        control.note_validation(step, 1.0)
    again = controlled(control._config)
    again.load_state(control.state())
    for each in (control, again):
        assert [each.learning_rate(step) for step in (8, 9, 14, 15)] == [2e-3, PEAK / 2, PEAK / 2, 1e-4]


def test_decay_over_the_run():
    """From 1 to end_scale in a straight line or by half a cosine; with the rate, times its share of the peak."""
    straight = OptimizerConfig(lr=PEAK, decay={"end_scale": 0.2})
    curved = OptimizerConfig(lr=PEAK, decay={"end_scale": 3.0, "shape": "cosine"})
    falling = OptimizerConfig(lr=PEAK, decay={"follows_rate": True})
    for step in (1, 25, 100):
        share = step / STEPS
        assert decay_scale(step, STEPS, straight, PEAK) == pytest.approx(1.0 - 0.8 * share)
        half = 0.5 * (1.0 + math.cos(math.pi * share))
        assert decay_scale(step, STEPS, curved, PEAK) == pytest.approx(3.0 - 2.0 * half)
        assert decay_scale(step, STEPS, falling, 0.25 * PEAK) == pytest.approx(0.25)


def test_every_step_is_paced():
    """What the engine is told: the decay's factor, and the rate of a group with a schedule of its own."""
    own = {"name": "linear", "min_lr": 1e-4}
    groups = [{"match": "head.*", "lr_scale": 2.0}, {"match": "embedding.*", "schedule": own}]
    config = tiny_config(optimizer={"groups": groups, "decay": {"end_scale": 0.0}})
    control = controlled(config)
    control.before_step(step := Step(10, [], range(0), None, 0, 0))
    lr = 1e-4 + (config.optimizer.lr - 1e-4) * 0.5
    assert control.engine.pacing == Pacing(decay_scale=0.5, lr_of_groups={1: pytest.approx(lr)})
    assert step.lr == learning_rate(10, 20, config.optimizer, config.schedule)
    control.after_step(step, StepResult(loss=1.0, grad_norm=1.0, lr=step.lr, num_tokens=1))


@pytest.mark.parametrize("change", ["spikes", "plug-in"])
def test_groups_follow_a_changed_rate(change):
    """Spikes that cut the run's rate, or a plug-in that sets another, reach groups with a schedule of their own by the
    same factor; what else a step is paced by stays, and so does the next step."""
    groups = [{"match": "embedding.*", "schedule": {"name": "constant"}}]
    control = controlled(tiny_config(optimizer={"groups": groups, "decay": {"end_scale": 0.0}}))
    step = Step(10, [], range(0), None, 0, 0)
    control.before_step(step)
    plain = control.engine.pacing
    if change == "spikes":
        hooks = SimpleNamespace(vetoes=SimpleNamespace(add=lambda veto: None))
        settings = SpikesConfig(cut_after=1, cut_factor=0.25)
        guard = SpikeGuard(
            settings,
            engine=SimpleNamespace(hooks=hooks),
            axes=None,
            device=None,
            recorder=None,
            adapts_scale=False,
        )
        guard._detector.note(9, 9.0, 9.0, is_spike=True)
        guard.before_step(step)
    else:
        step.lr *= 0.25
    step.clip_norm = 0.125
    control.settle(step)
    assert control.engine.clip_norm == 0.125
    assert control.engine.pacing == Pacing(plain.decay_scale, {0: pytest.approx(0.25 * plain.lr_of_groups[0])})
    control.before_step(again := Step(10, [], range(0), None, 0, 0))
    control.settle(again)
    assert control.engine.pacing == plain


@pytest.mark.parametrize(("kind", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_the_rate_follows_the_batch_of_a_stage(kind, power):
    """A run whose stages have batches of other sizes is taken, and every step has the rate of its own batch."""
    schedule = {"name": "constant", "warmup_steps": 0, "min_lr": 0.0, "scale_with_batch": kind}
    config = tiny_config(
        batch={"stages": [{"from_step": 7, "global_batch_size": 4}]}, schedule=schedule, data={"train": [{"path": "x"}]}
    )
    validate(config, 1)
    peak = config.optimizer.lr
    for stage in length_stages(config):
        control = controlled(stage.config, plan_stage(config, stage, 1))
        assert [control.learning_rate(step) for step in (1, 6)] == [peak, peak]
        assert [control.learning_rate(step) for step in (7, 20)] == [pytest.approx(peak * 0.5**power)] * 2
