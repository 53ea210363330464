"""What must hold between the settings of a schedule, its peak and its steps: of the run's, of its phases, and of those
that groups of weights have for themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.addition import Addition
from megalite.config.length import derive_steps, fill_schedule
from megalite.config.schedules import SCHEDULES, SETTINGS_OF_SOME
from megalite.config.schema import Config, ScheduleConfig
from megalite.config.sections.schedule import PhaseConfig, ShapeConfig
from megalite.config.wording import or_, unused

SAMPLED_STEPS = 1000
"""Of a plug-in's schedule, before training."""

ENDS = ("until_step", "until_tokens", "until_share")


@dataclass(frozen=True)
class _Place:
    """A shape, and where it stands."""

    key: str
    """Of its settings: `schedule`, `schedule.phases.1`."""
    shape: ShapeConfig
    filled: ShapeConfig
    """The same with its warmup in steps."""
    peak: float
    peak_key: str
    num_steps: int
    """That it has."""
    steps_of: str
    """Whose these are."""


def check_schedule(config: Config, *, is_stage: bool = False) -> Iterator[str]:
    """Complaints about every schedule: what has no effect, what is missing, what does not fit into the run.

    Args:
        is_stage: the config is that of a stage, beside which others may have a batch of another size.
    """
    is_length_known = (config.train.steps is None) != (config.train.tokens is None)
    groups = {f"optimizer.groups.{n}.schedule": group.schedule for n, group in enumerate(config.optimizer.groups)}
    for key, schedule in {"schedule": config.schedule, **groups}.items():
        if schedule is None:
            continue
        yield from _phases(schedule, key)
        yield from _measured(config, schedule, key)
        if not is_stage and not _grows(config):
            because = "a batch of one size: neither batch.ramp, nor batch.stages, nor batch.noise_scale.max_batch_size"
            yield from unused(schedule, ("scale_with_batch",), key, because)
        if not is_length_known:
            yield from _alone(schedule, key)
            continue
        complaints = list(_order(config, schedule, key))
        yield from complaints
        for place in _places(config, schedule, key) if not complaints else ():
            yield from _alone(place.shape, place.key)
            yield from _peak(place)
            yield from _length(place)
            yield from _brought(place)


def _grows(config: Config) -> bool:
    noise = config.batch.noise_scale
    may_grow = noise is not None and noise.max_batch_size is not None
    return config.batch.ramp is not None or bool(config.batch.stages) or may_grow


def _places(config: Config, schedule: ScheduleConfig, key: str) -> Iterator[_Place]:
    """A schedule, or its phases."""
    total, filled = derive_steps(config), fill_schedule(config, schedule)
    lr = config.optimizer.lr
    if schedule.name != "piecewise":
        yield _Place(key, schedule, filled, lr, "optimizer.lr", total, "the run")
        return
    yield _Place(key, schedule, filled, lr, "optimizer.lr", total, "the run")
    begin = 0
    for number, (phase, known) in enumerate(zip(schedule.phases, filled.phases, strict=True)):
        end, own = known.until_step or total, f"{key}.phases.{number}"
        peak_key = "its lr" if phase.lr is not None else "optimizer.lr"
        yield _Place(own, phase, known, phase.lr or lr, peak_key, end - begin, "the phase")
        begin = end


def _phases(schedule: ScheduleConfig, key: str) -> Iterator[str]:
    """What piecewise needs, and what cannot be one of its phases."""
    if schedule.name != "piecewise":
        return
    if len(schedule.phases) < 2:
        yield f"{key}.phases: found {len(schedule.phases)}, expected two or more with name=piecewise"
    for name in ("warmup_steps", "warmup_tokens", "warmup_fraction", "start_lr", "min_lr"):
        yield from unused(schedule, (name,), key, "name=piecewise, whose phases have their own")
    names = [phase.name for phase in schedule.phases]
    for number, name in enumerate(names):
        if name == "piecewise":
            yield f"{key}.phases.{number}.name: piecewise within piecewise; write its phases here"
    if names.count("plateau") > 1:
        yield f"{key}.phases: plateau found {names.count('plateau')} times; its cuts are counted once a run: keep one"
    for number, phase in enumerate(schedule.phases):
        given = [name for name in ENDS if getattr(phase, name) is not None]
        is_last = number == len(schedule.phases) - 1
        if is_last and given:
            yield f"{key}.phases.{number}.{given[0]}: the last phase ends with the run; leave it at null"
        elif not is_last and len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "found none of them"
            yield f"{key}.phases.{number}: {found}, expected one of {or_(ENDS)}, where this phase ends"


def _order(config: Config, schedule: ScheduleConfig, key: str) -> Iterator[str]:
    """Phases must end one behind the other, within the run; and none may begin at a rate of zero."""
    if schedule.name != "piecewise" or any(_phases(schedule, key)):
        return
    total, begin = derive_steps(config), 0
    for number, phase in enumerate(fill_schedule(config, schedule).phases[:-1]):
        end = phase.until_step or 0
        if not begin < end < total:
            yield (
                f"{key}.phases.{number}: it ends at step {end}, expected one behind step {begin}, where it begins, and "
                f"before step {total}, the last of the run"
            )
            return
        if schedule.phases[number + 1].lr is None and _ends_at_zero(phase):
            yield (
                f"{key}.phases.{number + 1}.lr: null takes the rate at which the phase before it ends, and "
                f"{phase.name} ends at min_lr=0; set this lr, or that min_lr"
            )
        begin = end


FALLS_TO_THE_END = ("linear", "cosine", "polynomial", "wsd", "one_cycle")


def _ends_at_zero(phase: PhaseConfig) -> bool:
    falls = phase.name in FALLS_TO_THE_END or (phase.name in ("constant", "power") and phase.decay_steps is not None)
    return falls and phase.min_lr == 0.0


def _measured(config: Config, schedule: ScheduleConfig, key: str) -> Iterator[str]:
    """What goes by measurements needs them."""
    names = {f"{key}.name": schedule.name}
    names |= {f"{key}.phases.{number}.name": phase.name for number, phase in enumerate(schedule.phases)}
    for place, name in names.items():
        if name == "plateau" and key != "schedule":
            yield f"{place}: plateau is for the schedule of the run, whose cuts are counted; use another one here"
        elif name == "plateau" and (config.train.eval_every is None or not config.data.valid):
            yield (
                f"{place}: plateau goes by the validation loss; set train.eval_every and data.valid, or use another "
                "schedule"
            )
        elif name == "noise_scale" and config.batch.noise_scale is None:
            yield (
                f"{place}: noise_scale goes by the noise in the gradients, which is not measured; set "
                "batch.noise_scale.every, or use another schedule"
            )


def _alone(shape: ShapeConfig, key: str) -> Iterator[str]:
    """What holds whatever the steps are."""
    yield from _no_effect(shape, key)
    yield from _shape(shape, key)


def _no_effect(shape: ShapeConfig, key: str) -> Iterator[str]:
    because = f"name={shape.name}"
    own = SCHEDULES[shape.name].settings
    of_others = [name for name in SETTINGS_OF_SOME if name not in own and name in type(shape).model_fields]
    yield from unused(shape, of_others, key, because)
    stays = shape.name == "constant" and shape.decay_steps is None
    if stays:
        yield from unused(shape, ("min_lr",), key, because)
    if stays or "decay_steps" not in own or (shape.name == "power" and shape.decay_steps is None):
        yield from unused(shape, ("decay_shape",), key, because)
    if not has_warmup(shape) and shape.name != "piecewise":
        yield from unused(shape, ("start_lr",), key, "no warmup")


def has_warmup(shape: ShapeConfig) -> bool:
    """Whether the rate rises first."""
    return bool(shape.warmup_steps or shape.warmup_tokens or shape.warmup_fraction)


def _peak(place: _Place) -> Iterator[str]:
    shape = place.shape
    stays = shape.name == "piecewise" or (shape.name == "constant" and shape.decay_steps is None)
    for name in ("start_lr",) if stays else ("start_lr", "min_lr"):
        value = getattr(shape, name)
        if value > place.peak:
            found = f"{place.peak_key}={place.peak:g}"
            yield f"{place.key}.{name}: {value:g} is above {found}; use {place.peak:g} or less"


def _shape(shape: ShapeConfig, key: str) -> Iterator[str]:
    warmups = ("warmup_steps", "warmup_tokens", "warmup_fraction")
    given = [name for name in warmups if getattr(shape, name) not in (None, 0)]
    if len(given) > 1:
        yield f"{key}.{given[1]}: found beside {given[0]}; give one of them"
    if shape.name == "one_cycle" and not given:
        yield f"{key}.warmup_fraction: null, but the first part of one_cycle is its warmup; use 0.3"
    if shape.name in ("inverse_sqrt", "power") and not given and shape.timescale_steps is None:
        yield f"{key}.timescale_steps: null stands for the steps of warmup, and there are none; set one of the two"
    if shape.milestones:
        if shape.period_steps is not None:
            yield f"{key}.period_steps: {shape.period_steps} found beside milestones; give one of them"
        if list(shape.milestones) != sorted(set(shape.milestones)):
            yield f"{key}.milestones: {list(shape.milestones)} do not rise; write each step once, in order"
    elif shape.period_steps is None and (period := SCHEDULES[shape.name].period):
        yield f"{key}.period_steps: null, but {shape.name} needs it: {period}"


def _length(place: _Place) -> Iterator[str]:
    shape, key, steps, of = place.shape, place.key, place.num_steps, place.steps_of
    warmup = place.filled.warmup_steps
    if warmup > steps and shape.warmup_tokens is None:
        yield f"{key}.warmup_steps: {warmup} is more than the {steps} steps of {of}; use {steps} or less"
    elif warmup > steps:
        yield (
            f"{key}.warmup_tokens: {shape.warmup_tokens} are {warmup} steps, more than the {steps} of {of}; use fewer"
        )
    elif warmup + (shape.decay_steps or 0) > steps:
        legal = f"use {steps - warmup} or less" if steps > warmup else "use a shorter warmup"
        yield (
            f"{key}.decay_steps: {shape.decay_steps} do not fit behind a warmup of {warmup} into the {steps} steps of "
            f"{of}; {legal}"
        )
    late = [str(step) for step in shape.milestones if not warmup <= step < steps]
    if late:
        yield f"{key}.milestones: {or_(late)} is not between warmup (step {warmup}) and the last step, {steps}"


def _brought(place: _Place) -> Iterator[str]:
    """Try a plug-in's schedule: in the middle of a long run it would be late to find that a rate is none."""
    shape, rate = place.shape, SCHEDULES[place.shape.name].rate
    if not isinstance(rate, Addition) or any(shape.problems()):
        return
    n, call = max(1, place.num_steps - place.filled.warmup_steps), rate.bound(shape.options)
    for k in sorted({1 + index * (n - 1) // SAMPLED_STEPS for index in range(SAMPLED_STEPS + 1)}):
        where = f"{place.key}.name: {shape.name}, at step {k:,} of {n:,} after warmup,"
        try:
            found = call(k, n, place.peak, shape.min_lr)
        except Exception as error:
            yield f"{where} failed: {type(error).__name__}: {error}; correct the plug-in"
            return
        if not isinstance(found, int | float) or not 0.0 <= found < math.inf:
            yield f"{where} gives the rate {found!r}, expected a number of at least 0; correct the plug-in"
            return
