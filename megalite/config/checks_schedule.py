"""What must hold between the settings of `schedule`, the rate and the length of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.addition import Addition
from megalite.config.plan import derive_steps, fill_schedule
from megalite.config.schedules import SCHEDULES, SETTINGS_OF_SOME
from megalite.config.schema import Config, ScheduleConfig
from megalite.config.wording import or_, unused

SAMPLED_STEPS = 1000
"""Of a plug-in's schedule, before training."""


def check_schedule(config: Config) -> Iterator[str]:
    """Complaints about the schedule: what has no effect, what is missing, what does not fit into the run."""
    schedule = config.schedule
    yield from _no_effect(schedule)
    yield from _rates(config)
    yield from _shape(schedule)
    if schedule.name == "plateau" and (config.train.eval_every is None or not config.data.valid):
        yield (
            "schedule.name: plateau goes by the validation loss; set train.eval_every and data.valid, or use another "
            "schedule"
        )
    if (config.train.steps is None) != (config.train.tokens is None):
        yield from _length(config)
        yield from _brought(config)


def _no_effect(schedule: ScheduleConfig) -> Iterator[str]:
    because = f"name={schedule.name}"
    own = SCHEDULES[schedule.name].settings
    yield from unused(schedule, [key for key in SETTINGS_OF_SOME if key not in own], "schedule", because)
    stays = schedule.name == "constant" and schedule.decay_steps is None
    if stays:
        yield from unused(schedule, ("min_lr",), "schedule", because)
    if stays or "decay_steps" not in own:
        yield from unused(schedule, ("decay_shape",), "schedule", because)
    if not has_warmup(schedule):
        yield from unused(schedule, ("start_lr",), "schedule", "no warmup")


def has_warmup(schedule: ScheduleConfig) -> bool:
    """Whether the rate rises first."""
    return bool(schedule.warmup_steps or schedule.warmup_tokens or schedule.warmup_fraction)


def _rates(config: Config) -> Iterator[str]:
    schedule, lr = config.schedule, config.optimizer.lr
    stays = schedule.name == "constant" and schedule.decay_steps is None
    for key in ("start_lr",) if stays else ("start_lr", "min_lr"):
        value = getattr(schedule, key)
        if value > lr:
            yield f"schedule.{key}: {value:g} is above optimizer.lr={lr:g}; use {lr:g} or less"


def _shape(schedule: ScheduleConfig) -> Iterator[str]:
    given = [
        key for key in ("warmup_steps", "warmup_tokens", "warmup_fraction") if getattr(schedule, key) not in (None, 0)
    ]
    if len(given) > 1:
        yield f"schedule.{given[1]}: found beside {given[0]}; give one of them"
    if schedule.name == "one_cycle" and not given:
        yield "schedule.warmup_fraction: null, but the first part of one_cycle is its warmup; use 0.3"
    if schedule.name == "inverse_sqrt" and not given and schedule.timescale_steps is None:
        yield "schedule.timescale_steps: null stands for the steps of warmup, and there are none; set one of the two"
    if schedule.milestones:
        if schedule.period_steps is not None:
            yield f"schedule.period_steps: {schedule.period_steps} found beside milestones; give one of them"
        if list(schedule.milestones) != sorted(set(schedule.milestones)):
            yield f"schedule.milestones: {list(schedule.milestones)} do not rise; write each step once, in order"
    elif schedule.period_steps is None and (period := SCHEDULES[schedule.name].period):
        yield f"schedule.period_steps: null, but {schedule.name} needs it: {period}"


def _length(config: Config) -> Iterator[str]:
    schedule, steps = config.schedule, derive_steps(config)
    warmup = fill_schedule(config).warmup_steps
    if warmup > steps and schedule.warmup_tokens is None:
        yield f"schedule.warmup_steps: {warmup} is more than the {steps} steps of the run; use {steps} or less"
    elif warmup > steps:
        yield (
            f"schedule.warmup_tokens: {schedule.warmup_tokens} are {warmup} steps, more than the {steps} of the run; "
            "use fewer"
        )
    elif warmup + (schedule.decay_steps or 0) > steps:
        legal = f"use {steps - warmup} or less" if steps > warmup else "use a shorter warmup"
        yield (
            f"schedule.decay_steps: {schedule.decay_steps} do not fit behind a warmup of {warmup} into the {steps} "
            f"steps of the run; {legal}"
        )
    late = [str(step) for step in schedule.milestones if not warmup <= step < steps]
    if late:
        yield f"schedule.milestones: {or_(late)} is not between warmup (step {warmup}) and the last step, {steps}"


def _brought(config: Config) -> Iterator[str]:
    """Try a plug-in's schedule: in the middle of a long run it would be late to find that a rate is none."""
    schedule, peak = config.schedule, config.optimizer.lr
    rate = SCHEDULES[schedule.name].rate
    if not isinstance(rate, Addition) or any(schedule.problems()):
        return
    n, call = max(1, derive_steps(config) - fill_schedule(config).warmup_steps), rate.bound(schedule.options)
    for k in sorted({1 + index * (n - 1) // SAMPLED_STEPS for index in range(SAMPLED_STEPS + 1)}):
        where = f"schedule.name: {schedule.name}, at step {k:,} of {n:,} after warmup,"
        try:
            found = call(k, n, peak, schedule.min_lr)
        except Exception as error:
            yield f"{where} failed: {type(error).__name__}: {error}; correct the plug-in"
            return
        if not isinstance(found, int | float) or not 0.0 <= found < math.inf:
            yield f"{where} gives the rate {found!r}, expected a number of at least 0; correct the plug-in"
            return
