"""What a whole run takes with a layout: every stage of one length by itself, and steps of smaller batches by their
share of a full one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalite.config.batch_sizes import batch_sizes
from megalite.config.length_stages import length_stages
from megalite.config.schema import Config
from megalite.planner.estimate import estimate
from megalite.planner.machines import Machine


@dataclass(frozen=True)
class WholeRun:
    """A run from its first step to its last, without failures."""

    steps: int
    seconds: float
    rank_hours: float
    megawatt_hours: float | None
    """None where the machine's file has no watts."""
    price: float | None
    """Of all rank-hours."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "steps": self.steps,
            "hours": self.seconds / 3600,
            "rank_hours": self.rank_hours,
            "megawatt_hours": self.megawatt_hours,
            "price": self.price,
        }

    def __str__(self) -> str:
        said = f"{self.steps:,} steps: {self.seconds / 3600:,.1f} hours, {self.rank_hours:,.0f} rank-hours"
        if self.megawatt_hours is not None:
            said += f", {self.megawatt_hours:,.2f} MWh"
        return (
            said if self.price is None else f"{said}, {self.price:,.0f} at {self.price / self.rank_hours:g} a rank-hour"
        )


def whole_run(
    config: Config, world_size: int, machine: Machine, *, vocab_size: int | None = None, price: float | None = None
) -> WholeRun:
    """What a validated config takes from its first step to its last.

    Args:
        vocab_size: where the config takes its tokenizer's.
        price: of a rank-hour.
    """
    sizes, seconds, last_step = batch_sizes(config.batch), 0.0, 0
    for stage in length_stages(config):
        last_step = stage.last_step
        samples = sizes.first_sample(last_step + 1) - sizes.first_sample(stage.first_step)
        of_step = estimate(stage.config, world_size, machine, vocab_size=vocab_size).seconds
        seconds += samples / stage.config.batch.global_batch_size * of_step
    hours = seconds / 3600 * world_size
    energy = None if machine.watts is None else hours * machine.watts / 1e6
    return WholeRun(last_step, seconds, hours, energy, None if price is None else hours * price)
