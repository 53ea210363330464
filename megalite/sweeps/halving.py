"""Successive halving: rungs, and how a trial gets from one to the next.

    steps     100          300          900
    trials    27    ->     9     ->     3         factor 3: the best third of each rung goes on

All trials of a rung end before any goes on, so what goes on is a function of their values, whatever ran beside what.
A trial goes on from its checkpoint where the learning rates of its steps are those of the whole run: then the rung is
the beginning of the whole run, to the last bit. A schedule that ends in a decay (wsd, constant with cooldown) trains
its rungs before the last without it. Where the rates of the run or of a group of weights depend on the length in
another way (cosine, linear, a warmup by fraction), or the weight decay does (`optimizer.decay.end_scale`), or the data
(stages, passes), or where plateau or early stopping would count a validation at the rung's end that the whole run does
not have, each rung is a run anew in a folder of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.config.load import in_folder
from megalite.config.plan import derive_steps, fill_schedule
from megalite.config.schema import Config, ScheduleConfig
from megalite.errors import ConfigError
from megalite.optim.schedules import decay_scale, learning_rate
from megalite.sweeps.settings import HalvingConfig
from megalite.sweeps.trials import Trial

SAMPLED_STEPS = 500
"""At which two runs are compared."""

DECAYING = ("wsd", "constant")


def rungs(trials: Sequence[Trial], settings: HalvingConfig) -> tuple[int, ...]:
    """Steps of each rung; the last is the whole run.

    Raises:
        ConfigError: trials differ in their steps, or the first rung is the whole run.
    """
    lengths = sorted({derive_steps(each.config) for each in trials})
    if len(lengths) > 1:
        raise ConfigError(
            [
                f"halving: trials have from {lengths[0]} to {lengths[-1]} steps, which have no rungs in common; give "
                "all the same train.steps"
            ]
        )
    (total,) = lengths
    if settings.min_steps >= total:
        raise ConfigError(
            [
                f"halving.min_steps: {settings.min_steps} is not below the {total} steps of a trial; use "
                f"{max(1, total // 2)} or less"
            ]
        )
    found = [settings.min_steps]
    while found[-1] * settings.factor < total:
        found.append(found[-1] * settings.factor)
    return (*found, total)


def num_promoted(number: int, factor: int) -> int:
    """How many of the trials of a rung go on."""
    return max(1, number // factor)


def at_rung(trial: Trial, steps: int) -> Trial:
    """A trial that trains to a rung: going on in its own folder where that is exact, else anew in another."""
    total = derive_steps(trial.config)
    if steps == total:
        return replace(trial, steps=steps)
    part = beginning_of(trial.config, steps)
    if part is not None:
        return replace(trial, config=part, steps=steps)
    name = f"{trial.name}-at-{steps}"
    return replace(
        trial, name=name, config=in_folder(_cut(trial.config, steps), trial.folder.with_name(name)), steps=steps
    )


def beginning_of(config: Config, steps: int) -> Config | None:
    """The config under which a run of so many steps is the beginning of the whole one; None where there is none."""
    mix = config.data.mix
    if mix.stages or mix.epochs or mix.ranks or _has_one_look_more(config, steps):
        return None
    part = _without_decay(_cut(config, steps))
    looked_at = sorted({1 + index * (steps - 1) // SAMPLED_STEPS for index in range(SAMPLED_STEPS + 1)})
    return part if _paces(part, looked_at) == _paces(config, looked_at) else None


def _has_one_look_more(config: Config, steps: int) -> bool:
    """Whether the validation at the end of a rung is none of the whole run's, and something goes by their number."""
    schedule, every = config.schedule, config.train.eval_every
    goes_by_it = "plateau" in (schedule.name, *(phase.name for phase in schedule.phases))
    goes_by_it = goes_by_it or config.train.early_stopping is not None
    return goes_by_it and (every is None or steps % every != 0)


def _paces(config: Config, steps: Sequence[int]) -> list[tuple[float, ...]]:
    """What the updates of some steps take from how far the run has come: the rates of the run and of groups with a
    schedule of their own, and the factor on the weight decay."""
    total, optimizer = derive_steps(config), config.optimizer
    of_groups = [group.schedule for group in optimizer.groups if group.schedule is not None]
    filled = [fill_schedule(config, schedule) for schedule in (config.schedule, *of_groups)]
    found = []
    for step in steps:
        rates = [learning_rate(step, total, optimizer, schedule) for schedule in filled]
        found.append((*rates, decay_scale(step, total, optimizer, rates[0])))
    return found


def _without_decay(config: Config) -> Config:
    """The same with schedules that stay at their peak where they would end in a decay."""
    groups = [
        group if group.schedule is None else group.model_copy(update={"schedule": _stable(group.schedule)})
        for group in config.optimizer.groups
    ]
    optimizer = config.optimizer.model_copy(update={"groups": tuple(groups)})
    return config.model_copy(update={"schedule": _stable(config.schedule), "optimizer": optimizer})


def _stable(schedule: ScheduleConfig) -> ScheduleConfig:
    if schedule.name not in DECAYING:
        return schedule
    return schedule.model_copy(update={"name": "constant", "decay_steps": None, "decay_shape": "linear", "min_lr": 0.0})


def _cut(config: Config, steps: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps, "tokens": None})})
