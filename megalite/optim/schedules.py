"""Learning-rate schedules: pure functions of the step, so a resumed run needs no state.

Steps count from 1. Warmup rises linearly and reaches the peak at step `warmup_steps`; what comes after it is a function
of k, the steps since then, and n, the steps from there to the last one. A decay to the end reaches `min_lr` at k = n.

    lr |      ________           wsd, constant: hold, then decay over the last decay_steps
       |    /         \\
       |  /             \\       cosine, linear, polynomial, one_cycle: decay over all n steps
       |/                 \\     others: by k alone
       +------------------------ step

`config.schedules` names these functions: each takes k, n, the peak and the section, and returns the rate. Only
`plateau` depends on more than the step: on how often the validation loss has stalled (`optim.adaptive`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megalite.addition import Addition, load
from megalite.config.schedules import SCHEDULES
from megalite.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(
    step: int, total_steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, num_cuts: int = 0
) -> float:
    """Learning rate of the update number `step`, from 1 to `total_steps`.

    Args:
        schedule: with its warmup in steps (`config.plan.fill_schedule`).
        num_cuts: how often `plateau` has lowered the rate.
    """
    peak, warmup = optimizer.lr, schedule.warmup_steps
    if step <= warmup:
        rise = step / warmup
        risen = 1.0 - _cosine(rise) if schedule.name == "one_cycle" else rise
        return schedule.start_lr + (peak - schedule.start_lr) * risen
    rate = SCHEDULES[schedule.name].rate
    if rate is None:
        return max(schedule.min_lr, peak * schedule.gamma**num_cuts)
    k, n = step - warmup, max(1, total_steps - warmup)
    if isinstance(rate, Addition):
        return float(rate.bound(schedule.options)(k, n, peak, schedule.min_lr))
    return load(rate)(k, n, peak, schedule)


def wsd_decay_steps(total_steps: int, schedule: ScheduleConfig) -> int:
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


def _above_min(share: float, peak: float, schedule: ScheduleConfig) -> float:
    return schedule.min_lr + (peak - schedule.min_lr) * share


def linear(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """Down to the end in a straight line."""
    return _above_min(1.0 - k / n, peak, schedule)


def cosine(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """The same by half a cosine (Loshchilov & Hutter 2017)."""
    return _above_min(_cosine(k / n), peak, schedule)


def polynomial(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """The same by a power of what is left."""
    return _above_min((1.0 - k / n) ** schedule.power, peak, schedule)


def hold_then_decay(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """The peak until `decay_steps` before the last step, or until warmup when the run is shorter."""
    decay = min(n, wsd_decay_steps(n + schedule.warmup_steps, schedule))
    progress = max(0.0, (k - (n - decay)) / decay)
    return _above_min(_REMAINING[schedule.decay_shape](progress), peak, schedule)


def constant(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """The peak, to the end or until a final decay."""
    return peak if schedule.decay_steps is None else hold_then_decay(k, n, peak, schedule)


def exponential(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """By the factor gamma in every `period_steps` steps."""
    return max(schedule.min_lr, peak * schedule.gamma ** (k / (schedule.period_steps or 1)))


def step(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """The first `period_steps` steps after warmup use the peak, the next as many peak x gamma, and so on."""
    if schedule.milestones:
        num_drops = sum(k + schedule.warmup_steps > milestone for milestone in schedule.milestones)
    else:
        num_drops = (k - 1) // (schedule.period_steps or 1)
    return max(schedule.min_lr, peak * schedule.gamma**num_drops)


def inverse_sqrt(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """As the root of time (Vaswani et al. 2017)."""
    timescale = schedule.timescale_steps or max(1, schedule.warmup_steps)
    return max(schedule.min_lr, peak * math.sqrt(timescale / (timescale + k)))


def cyclical(k: int, n: int, peak: float, schedule: ScheduleConfig) -> float:
    """Cycles of `period_steps`: a triangle begins and ends at min_lr, a cosine begins at the peak."""
    number, place = divmod(k, schedule.period_steps or 1)
    progress = place / (schedule.period_steps or 1)
    height = _cosine(progress) if schedule.cycle_shape == "cosine" else 1.0 - abs(2.0 * progress - 1.0)
    return _above_min(height * schedule.gamma**number, peak, schedule)
