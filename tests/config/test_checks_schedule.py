"""Conflicts of the schedule and of growing batches: one sentence each, with what would be legal."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.config.validate import validate
from megalite.errors import ConfigError

VALID = {"data": {"train": [{"path": "t"}], "valid": [{"path": "v"}]}, "train": {"steps": 100, "eval_every": 5}}


def complaints(world_size: int = 1, **sections: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        validate(Config(**{"train": {"steps": 100}, **sections}), world_size)
    return caught.value.problems


SCHEDULES = {
    "two warmups": (
        {"warmup_steps": 5, "warmup_fraction": 0.1},
        "schedule.warmup_fraction: found beside warmup_steps; give one of them",
    ),
    "warmup of more tokens than the run's": (
        {"warmup_tokens": 10**6},
        "schedule.warmup_tokens: 1000000 are 245 steps, more than the 100 of the run; use fewer",
    ),
    "a start without warmup": (
        {"start_lr": 1e-5},
        "schedule.start_lr: found 1e-05, but it has no effect with no warmup; leave it at 0.0",
    ),
    "a start above the peak": (
        {"start_lr": 1.0, "warmup_steps": 3},
        "schedule.start_lr: 1 is above optimizer.lr=0.0003; use 0.0003 or less",
    ),
    "power of a cosine": (
        {"power": 3.0},
        "schedule.power: found 3.0, but it has no effect with name=cosine; leave it at 2.0",
    ),
    "plateau's settings": (
        {"plateau": {"patience": 9}},
        "schedule.plateau: found a group, but it has no effect with name=cosine; leave it out",
    ),
    "drops without a period": (
        {"name": "step"},
        "schedule.period_steps: null, but step needs it: the steps between drops, or milestones",
    ),
    "drops by both": (
        {"name": "step", "period_steps": 3, "milestones": (5, 8)},
        "schedule.period_steps: 3 found beside milestones; give one of them",
    ),
    "milestones that fall": (
        {"name": "step", "milestones": (8, 5)},
        "schedule.milestones: [8, 5] do not rise; write each step once, in order",
    ),
    "a milestone after the run": (
        {"name": "step", "milestones": (8, 100)},
        "schedule.milestones: 100 is not between warmup (step 0) and the last step, 100",
    ),
    "one cycle that does not rise": (
        {"name": "one_cycle"},
        "schedule.warmup_fraction: null, but the first part of one_cycle is its warmup; use 0.3",
    ),
    "an inverse root without a scale": (
        {"name": "inverse_sqrt"},
        "schedule.timescale_steps: null stands for the steps of warmup, and there are none; set one of the two",
    ),
    "a plateau of nothing": (
        {"name": "plateau"},
        "schedule.name: plateau goes by the validation loss; set train.eval_every and data.valid, or use another "
        "schedule",
    ),
    "a decay's shape without a decay": (
        {"name": "constant", "decay_shape": "sqrt"},
        "schedule.decay_shape: found sqrt, but it has no effect with name=constant; leave it at linear",
    ),
    "a cooldown longer than the run": (
        {"name": "constant", "decay_steps": 101},
        "schedule.decay_steps: 101 do not fit behind a warmup of 0 into the 100 steps of the run; use 100 or less",
    ),
    "a power without a scale": (
        {"name": "power"},
        "schedule.timescale_steps: null stands for the steps of warmup, and there are none; set one of the two",
    ),
    "noise that is not measured": (
        {"name": "noise_scale"},
        "schedule.name: noise_scale goes by the noise in the gradients, which is not measured; set "
        "batch.noise_scale.every, or use another schedule",
    ),
    "rates by a batch that does not change": (
        {"scale_with_batch": "sqrt"},
        "schedule.scale_with_batch: found sqrt, but it has no effect with a batch of one size: neither batch.ramp, nor "
        "batch.stages, nor batch.noise_scale.max_batch_size; leave it at none",
    ),
    "phases of another schedule": (
        {"phases": [{"name": "constant"}]},
        "schedule.phases: found 1 of them, but it has no effect with name=cosine; leave it at ()",
    ),
    "one phase": (
        {"name": "piecewise", "phases": [{"name": "constant"}]},
        "schedule.phases: found 1, expected two or more with name=piecewise",
    ),
    "a warmup before all phases": (
        {"name": "piecewise", "warmup_steps": 5, "phases": [{"name": "constant", "until_step": 9}, {"name": "linear"}]},
        "schedule.warmup_steps: found 5, but it has no effect with name=piecewise, whose phases have their own; leave "
        "it at 0",
    ),
    "piecewise within piecewise": (
        {"name": "piecewise", "phases": [{"name": "piecewise", "until_step": 9}, {"name": "linear"}]},
        "schedule.phases.0.name: piecewise within piecewise; write its phases here",
    ),
    "a phase that does not end": (
        {"name": "piecewise", "phases": [{"name": "constant"}, {"name": "linear"}]},
        "schedule.phases.0: found none of them, expected one of until_step, until_tokens or until_share, where this "
        "phase ends",
    ),
    "a phase that ends twice": (
        {"name": "piecewise", "phases": [{"until_step": 9, "until_share": 0.5, "min_lr": 1e-5}, {"name": "linear"}]},
        "schedule.phases.0: found until_step and until_share, expected one of until_step, until_tokens or until_share, "
        "where this phase ends",
    ),
    "an end of the last phase": (
        {"name": "piecewise", "phases": [{"name": "constant", "until_step": 9}, {"name": "linear", "until_step": 20}]},
        "schedule.phases.1.until_step: the last phase ends with the run; leave it at null",
    ),
    "a phase behind the run": (
        {"name": "piecewise", "phases": [{"name": "constant", "until_step": 100}, {"name": "linear"}]},
        "schedule.phases.0: it ends at step 100, expected one behind step 0, where it begins, and before step 100, the "
        "last of the run",
    ),
    "a phase from zero": (
        {"name": "piecewise", "phases": [{"name": "linear", "until_step": 50}, {"name": "constant"}]},
        "schedule.phases.1.lr: null takes the rate at which the phase before it ends, and linear ends at min_lr=0; set "
        "this lr, or that min_lr",
    ),
    "a cosine's power in a phase": (
        {"name": "piecewise", "phases": [{"name": "constant", "until_step": 50}, {"name": "cosine", "power": 3.0}]},
        "schedule.phases.1.power: found 3.0, but it has no effect with name=cosine; leave it at 2.0",
    ),
    "a floor above a phase's peak": (
        {
            "name": "piecewise",
            "phases": [{"name": "constant", "until_step": 50}, {"name": "linear", "lr": 1e-4, "min_lr": 2e-4}],
        },
        "schedule.phases.1.min_lr: 0.0002 is above its lr=0.0001; use 0.0001 or less",
    ),
    "a warmup longer than its phase": (
        {
            "name": "piecewise",
            "phases": [{"name": "constant", "until_step": 50, "warmup_steps": 51}, {"name": "linear"}],
        },
        "schedule.phases.0.warmup_steps: 51 is more than the 50 steps of the phase; use 50 or less",
    ),
}


@pytest.mark.parametrize(("schedule", "complaint"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedule(schedule, complaint):
    """Each conflict alone gives this one sentence."""
    assert complaints(schedule=schedule) == (complaint,)


RAMPS = {
    "no length": ({"start_size": 2}, "batch.ramp: found neither samples nor tokens; give one of them, the data over "),
    "two lengths": (
        {"start_size": 2, "samples": 9, "tokens": 9},
        "batch.ramp: found both samples and tokens; give one of them, the data over which the batch grows",
    ),
    "not below": ({"start_size": 8, "samples": 9}, "batch.ramp.start_size: 8 is not below global_batch_size=8; use a "),
    "steps that do not lead there": (
        {"start_size": 2, "increment": 4, "samples": 9},
        "batch.ramp.increment: steps of 4 do not lead from 2 to global_batch_size=8; use 1, 2, 3 or 6",
    ),
    "parts of a micro-batch": (
        {"start_size": 2, "increment": 3, "samples": 9},
        "batch.ramp.increment: 3 is not a multiple of micro_batch_size x dp = 2 x 1 = 2; use 2 or 4",
    ),
}


@pytest.mark.parametrize(("ramp", "complaint"), RAMPS.values(), ids=RAMPS)
def test_ramp(ramp, complaint):
    """Each conflict alone gives one sentence, which begins like this."""
    (found,) = complaints(batch={"micro_batch_size": 2, "global_batch_size": 8, "ramp": ramp})
    assert found.startswith(complaint)


ALLOWED = {
    "every setting of a step schedule": {"name": "step", "gamma": 0.3, "milestones": (80, 90), "min_lr": 1e-6},
    "constant with cooldown": {"name": "constant", "decay_steps": 20, "decay_shape": "sqrt", "min_lr": 1e-6},
    "a cycle": {"name": "cyclical", "period_steps": 10, "cycle_shape": "cosine", "gamma": 1.0},
    "plateau": {"name": "plateau", "plateau": {"patience": 0}, "gamma": 0.3, "warmup_steps": 3},
    "one cycle": {"name": "one_cycle", "warmup_fraction": 0.3, "start_lr": 1e-5},
    "power with cooldown": {"name": "power", "timescale_steps": 20, "decay_steps": 9, "decay_shape": "cosine"},
    "phases": {
        "name": "piecewise",
        "phases": [
            {"name": "constant", "until_tokens": 10**5, "warmup_steps": 4},
            {"name": "plateau", "lr": 1e-4, "until_share": 0.5},
            {"name": "step", "milestones": (8, 20), "until_step": 80},
            {"name": "cosine", "lr": 2e-4, "warmup_fraction": 0.1},
        ],
    },
    "inverse root": {"name": "inverse_sqrt", "warmup_tokens": 10**5},
}


@pytest.mark.parametrize("schedule", ALLOWED.values(), ids=ALLOWED)
def test_allowed(schedule):
    validate(Config(**VALID, schedule=schedule), 1)
