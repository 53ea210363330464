"""Learning-rate schedules: pure functions of the step, so a resumed run needs no state.

Steps count from 1. Warmup rises linearly and reaches the peak at step `warmup_steps`; what comes after it is a function
of k, the steps since then, and n, the steps from there to the last one. A decay to the end reaches `min_lr` at k = n.

    lr |      ________           wsd, constant: hold, then decay over the last decay_steps
       |    /         \\
       |  /             \\       cosine, linear, polynomial, one_cycle: decay over all n steps
       |/                 \\     others: by k alone
       +------------------------ step

`config.schedules` names these functions: each takes k, n, the peak and the section, and returns the rate. Those that
depend on more than the step are given what the run has measured, too. A piecewise schedule is some others one after
another, each with steps of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megalite.addition import Addition, load
from megalite.config.schedules import SCHEDULES
from megalite.config.schema import OptimizerConfig, ScheduleConfig
from megalite.config.sections.schedule import PhaseConfig, ShapeConfig


@dataclass(frozen=True)
class StepMeasures:
    """What a rate may depend on besides its step."""

    num_cuts: int = 0
    """How often `plateau` has lowered the rate."""
    noise_over_batch: float = 0.0
    """The gradient noise scale over the step's tokens; 0 before it is known."""
    batch_growth: float = 1.0
    """The step's batch over batch.global_batch_size."""


NOTHING_MEASURED = StepMeasures()


def learning_rate(
    step: int,
    total_steps: int,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    measured: StepMeasures = NOTHING_MEASURED,
) -> float:
    """Learning rate of the update number `step`, from 1 to `total_steps`.

    Args:
        schedule: with its steps known (`config.plan.fill_schedule`).
    """
    rate = _rate(step, total_steps, optimizer.lr, schedule, measured)
    return rate * measured.batch_growth ** _BATCH_EXPONENTS[schedule.scale_with_batch]


_BATCH_EXPONENTS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


def _rate(step: int, total_steps: int, peak: float, shape: ShapeConfig, measured: StepMeasures) -> float:
    warmup = shape.warmup_steps
    if step <= warmup:
        return shape.start_lr + (peak - shape.start_lr) * _risen(step, warmup, shape.name)
    entry, k, n = SCHEDULES[shape.name], step - warmup, max(1, total_steps - warmup)
    if isinstance(entry.rate, Addition):
        return float(entry.rate.bound(shape.options)(k, n, peak, shape.min_lr))
    return load(entry.rate)(k, n, peak, shape, *([measured] if entry.is_measured else []))


def _risen(step: int, warmup: int, name: str) -> float:
    """The share of the way up that a step of warmup has come; one_cycle's first step is at the foot, as torch's."""
    if name != "one_cycle":
        return step / warmup
    return 1.0 - _cosine((step - 1) / (warmup - 1)) if warmup > 1 else 1.0


def decay_scale(step: int, total_steps: int, optimizer: OptimizerConfig, lr: float) -> float:
    """Factor on the weight decay of a step whose rate is `lr`."""
    decay = optimizer.decay
    left = _REMAINING[decay.shape](step / total_steps)
    scale = decay.end_scale + (1.0 - decay.end_scale) * left
    return scale * lr / optimizer.lr if decay.follows_rate else scale


def shape_at(step: int, schedule: ScheduleConfig) -> ShapeConfig:
    """The shape that decides a step's rate: the schedule itself, or one of its phases."""
    last = len(schedule.phases) - 1
    within = (phase for number, phase in enumerate(schedule.phases) if number == last or step <= _end(phase, step))
    return next(within, schedule)


def wsd_decay_steps(total_steps: int, schedule: ShapeConfig) -> int:
    """Length of the final decay of a wsd schedule: as configured, or a tenth of the run."""
    return schedule.decay_steps or max(1, total_steps // 10)


def last_stable_step(total_steps: int, schedule: ScheduleConfig) -> int | None:
    """The last step before the final decay of wsd and constant, from which other decays can branch off.

    None where there is no such decay, or nothing before it.
    """
    has_decay = schedule.name == "wsd" or (schedule.name == "constant" and schedule.decay_steps is not None)
    step = total_steps - wsd_decay_steps(total_steps, schedule)
    return step if has_decay and step > schedule.warmup_steps else None


def _cosine(progress: float) -> float:
    """From 1 at progress 0 to 0 at progress 1, by half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Share of the way from min_lr to the peak that is left at a progress from 0 to 1."""


def _above_min(share: float, peak: float, schedule: ShapeConfig) -> float:
    return schedule.min_lr + (peak - schedule.min_lr) * share


def linear(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """Down to the end in a straight line."""
    return _above_min(1.0 - k / n, peak, schedule)


def cosine(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """The same by half a cosine (Loshchilov & Hutter 2017)."""
    return _above_min(_cosine(k / n), peak, schedule)


def polynomial(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """The same by a power of what is left."""
    return _above_min((1.0 - k / n) ** schedule.power, peak, schedule)


def hold_then_decay(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """The peak until `decay_steps` before the last step, or until warmup when the run is shorter."""
    decay = min(n, wsd_decay_steps(n + schedule.warmup_steps, schedule))
    progress = max(0.0, (k - (n - decay)) / decay)
    return _above_min(_REMAINING[schedule.decay_shape](progress), peak, schedule)


def constant(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """The peak, to the end or until a final decay."""
    return peak if schedule.decay_steps is None else hold_then_decay(k, n, peak, schedule)


def exponential(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """By the factor gamma in every `period_steps` steps."""
    return max(schedule.min_lr, peak * schedule.gamma ** (k / (schedule.period_steps or 1)))


def step(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """The first `period_steps` steps after warmup use the peak, the next as many peak x gamma, and so on."""
    if schedule.milestones:
        num_drops = sum(k + schedule.warmup_steps > milestone for milestone in schedule.milestones)
    else:
        num_drops = (k - 1) // (schedule.period_steps or 1)
    return max(schedule.min_lr, peak * schedule.gamma**num_drops)


def power(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """The peak, and from `timescale_steps` of the run on a power of its steps; maybe with a final decay."""
    timescale = schedule.timescale_steps or max(1, schedule.warmup_steps)
    rate = peak * min(1.0, (timescale / (k + schedule.warmup_steps)) ** schedule.exponent)
    if schedule.decay_steps is None:
        return max(schedule.min_lr, rate)
    return hold_then_decay(k, n, max(schedule.min_lr, rate), schedule)


def plateau(k: int, n: int, peak: float, schedule: ShapeConfig, measured: StepMeasures) -> float:
    """By the factor gamma each time that the validation loss has stalled (`optim.adaptive`)."""
    return max(schedule.min_lr, peak * schedule.gamma**measured.num_cuts)


def by_noise_scale(k: int, n: int, peak: float, schedule: ShapeConfig, measured: StepMeasures) -> float:
    """The rate that is best for a batch with so much noise in its gradient (McCandlish et al. 2018, equation 2.6)."""
    return max(schedule.min_lr, peak / (1.0 + measured.noise_over_batch))


def piecewise(k: int, n: int, peak: float, schedule: ScheduleConfig, measured: StepMeasures) -> float:
    """Each phase from where the one before has ended, by its own peak or by the rate there."""
    begin, last = 0, len(schedule.phases) - 1
    for number, phase in enumerate(schedule.phases):
        top, end = phase.lr or peak, n if number == last else _end(phase, n)
        if k <= end or number == last:
            return _rate(k - begin, end - begin, top, phase, measured)
        begin, peak = end, _rate(end - begin, end - begin, top, phase, measured)
    raise AssertionError("no phases")


def _end(phase: PhaseConfig, otherwise: int) -> int:
    return otherwise if phase.until_step is None else phase.until_step


def inverse_sqrt(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """As the root of time (Vaswani et al. 2017)."""
    timescale = schedule.timescale_steps or max(1, schedule.warmup_steps)
    return max(schedule.min_lr, peak * math.sqrt(timescale / (timescale + k)))


def cyclical(k: int, n: int, peak: float, schedule: ShapeConfig) -> float:
    """Cycles of `period_steps`: a triangle begins and ends at min_lr, a cosine begins at the peak."""
    number, place = divmod(k, schedule.period_steps or 1)
    progress = place / (schedule.period_steps or 1)
    height = _cosine(progress) if schedule.cycle_shape == "cosine" else 1.0 - abs(2.0 * progress - 1.0)
    return _above_min(height * schedule.gamma**number, peak, schedule)
