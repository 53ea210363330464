"""Learning-rate schedules: pure functions of the step, so a resumed run needs no state.

Steps count from 1. Warmup rises linearly and reaches the peak at step `warmup_steps`; every decay reaches `min_lr` at
the last step.

    lr |      ________           wsd: hold, then decay over the last decay_steps
       |    /         \\
       |  /             \\       cosine, linear: decay over all steps after warmup
       |/                 \\
       +------------------------ step
"""

from __future__ import annotations

import math

from megalite.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, total_steps: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """Learning rate of the update number `step`, from 1 to `total_steps`."""
    peak, warmup = optimizer.lr, schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    decay_from = warmup
    if schedule.name == "wsd":
        decay_from = max(warmup, total_steps - wsd_decay_steps(total_steps, schedule))
    progress = (step - decay_from) / max(1, total_steps - decay_from)
    shape = schedule.decay_shape if schedule.name == "wsd" else schedule.name
    return schedule.min_lr + (peak - schedule.min_lr) * _remaining(shape, min(max(progress, 0.0), 1.0))


def wsd_decay_steps(total_steps: int, schedule: ScheduleConfig) -> int:
    """Length of the final decay of a wsd schedule: as configured, or a tenth of the run."""
    return schedule.decay_steps or max(1, total_steps // 10)


def _remaining(shape: str, progress: float) -> float:
    """Share of the way from min_lr to the peak that is left, 1 at progress 0 and 0 at progress 1."""
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    return 1.0 - progress
