"""What a config's schedule comes to, step by step."""

from __future__ import annotations

from megalite.config.batch_sizes import batch_sizes
from megalite.config.length import derive_steps, fill_schedule
from megalite.config.schema import Config, ScheduleConfig
from megalite.monitor.curves import Curve
from megalite.optim.schedules import StepMeasures, decay_scale, learning_rate

MAX_POINTS = 4000
"""Steps that are looked at: more than a figure has pixels."""


def schedule_curves(config: Config) -> list[Curve]:
    """The learning rate of a validated config over its run, and the batch size if it changes.

    `plateau` is drawn as it is without a plateau, `noise_scale` as it is without noise.
    """
    total, schedule, sizes = derive_steps(config), fill_schedule(config), batch_sizes(config.batch)
    steps = sorted({1 + (total - 1) * point // max(1, MAX_POINTS - 1) for point in range(MAX_POINTS)})
    size = config.batch.global_batch_size

    def rate(step: int, shape: ScheduleConfig) -> float:
        return learning_rate(step, total, config.optimizer, shape, StepMeasures(batch_growth=sizes.size(step) / size))

    curves = [Curve("learning rate", steps, [rate(step, schedule) for step in steps])]
    for number, group in enumerate(config.optimizer.groups):
        if group.schedule is not None:
            own = fill_schedule(config, group.schedule)
            curves.append(
                Curve(f"learning rate, optimizer.groups.{number}", steps, [rate(step, own) for step in steps])
            )
    decays = [decay_scale(step, total, config.optimizer, rate(step, schedule)) for step in steps]
    if any(scale != 1.0 for scale in decays):
        curves.append(Curve("weight decay", steps, [scale * config.optimizer.weight_decay for scale in decays]))
    if len(sizes.spans) > 1:
        curves.append(Curve("batch size, sequences", steps, [sizes.size(step) for step in steps]))
    return curves
