"""What a config's schedule comes to, step by step."""

from __future__ import annotations

from megalite.config.batch_sizes import batch_sizes
from megalite.config.plan import derive_steps, fill_schedule
from megalite.config.schema import Config
from megalite.monitor.curves import Curve
from megalite.optim.schedules import learning_rate

MAX_POINTS = 4000
"""Steps that are looked at: more than a figure has pixels."""


def schedule_curves(config: Config) -> list[Curve]:
    """The learning rate of a validated config over its run, and the batch size if it changes.

    `plateau` is drawn as it is without a plateau.
    """
    total, schedule, sizes = derive_steps(config), fill_schedule(config), batch_sizes(config.batch)
    steps = sorted({1 + (total - 1) * point // max(1, MAX_POINTS - 1) for point in range(MAX_POINTS)})
    curves = [Curve("learning rate", steps, [learning_rate(step, total, config.optimizer, schedule) for step in steps])]
    if len(sizes.spans) > 1:
        curves.append(Curve("batch size, sequences", steps, [sizes.size(step) for step in steps]))
    return curves
