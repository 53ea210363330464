"""How long a run is, and its schedules in steps of it: from tokens and shares to steps."""

from __future__ import annotations

from typing import TypeVar

from megalite.config.batch_sizes import batch_sizes, steps_for_tokens, tokens_before
from megalite.config.schema import Config, ScheduleConfig
from megalite.config.sections.schedule import PhaseConfig, ShapeConfig


def derive_steps(config: Config) -> int:
    """Optimizer steps of the run: as configured, or the configured tokens rounded up to whole steps."""
    return config.train.steps or steps_for_tokens(config.batch, config.train.tokens or 0)


def derive_samples(config: Config) -> int:
    """Sequences that the run reads."""
    return batch_sizes(config.batch).first_sample(derive_steps(config) + 1)


def fill_schedule(config: Config, schedule: ScheduleConfig | None = None) -> ScheduleConfig:
    """A schedule with its warmup and its phases in steps, whatever they were given in; the run's when none is given."""
    schedule, total = schedule or config.schedule, derive_steps(config)
    filled: ScheduleConfig = _fill_warmup(config, schedule, 0, total)
    phases, begin, last = list[PhaseConfig](), 0, len(schedule.phases) - 1
    for number, phase in enumerate(schedule.phases):
        end = total if number == last else _end_of_phase(config, phase)
        known = {"until_step": None if number == last else end, "until_tokens": None, "until_share": None}
        phases.append(_fill_warmup(config, phase, begin, end).model_copy(update=known))
        begin = end
    return filled.model_copy(update={"phases": tuple(phases)})


ShapeT = TypeVar("ShapeT", bound=ShapeConfig)


def _fill_warmup(config: Config, shape: ShapeT, begin: int, end: int) -> ShapeT:
    """With its warmup in steps.

    Args:
        begin: the last step before it.
        end: its last one.
    """
    steps = shape.warmup_steps
    if shape.warmup_tokens is not None:
        before = tokens_before(config.batch, begin + 1)
        steps = steps_for_tokens(config.batch, before + shape.warmup_tokens) - begin
    if shape.warmup_fraction is not None:
        steps = round(shape.warmup_fraction * (end - begin))
    return shape.model_copy(update={"warmup_steps": steps, "warmup_tokens": None, "warmup_fraction": None})


def _end_of_phase(config: Config, phase: PhaseConfig) -> int:
    """Its last step."""
    if phase.until_tokens is not None:
        return steps_for_tokens(config.batch, phase.until_tokens)
    if phase.until_share is not None:
        return round(phase.until_share * derive_steps(config))
    return phase.until_step or 0
