"""Learning-rate schedules by name: where each is computed, and what it reads of `schedule`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.addition import Addition
from megalite.plugins import Table


@dataclass(frozen=True)
class Schedule:
    """A shape of the rate after warmup."""

    rate: str | Addition
    """`module:name` of `(k, n, peak, schedule)`, the rate of the k-th step after warmup, of n; of a plug-in,
    `(k, n, peak, min_lr)`."""
    settings: tuple[str, ...] = ()
    """Keys of the section that it reads, of those that not all do."""
    period: str = ""
    """What `period_steps` is to it, where it must have one."""
    is_measured: bool = False
    """Its function is given what the run has measured, too."""


BETWEEN_DROPS = "the steps between drops, or milestones"

_IN = "megalite.optim.schedules"

SCHEDULES: Table[Schedule] = Table(
    "schedule",
    {
        "constant": Schedule(f"{_IN}:constant", ("decay_steps",)),
        "linear": Schedule(f"{_IN}:linear"),
        "cosine": Schedule(f"{_IN}:cosine"),
        "polynomial": Schedule(f"{_IN}:polynomial", ("power",)),
        "exponential": Schedule(f"{_IN}:exponential", ("gamma", "period_steps"), "the steps of a fall by gamma"),
        "step": Schedule(f"{_IN}:step", ("gamma", "period_steps", "milestones"), BETWEEN_DROPS),
        "inverse_sqrt": Schedule(f"{_IN}:inverse_sqrt", ("timescale_steps",)),
        "power": Schedule(f"{_IN}:power", ("exponent", "timescale_steps", "decay_steps")),
        "wsd": Schedule(f"{_IN}:hold_then_decay", ("decay_steps",)),
        "cyclical": Schedule(f"{_IN}:cyclical", ("gamma", "period_steps", "cycle_shape"), "the steps of a cycle"),
        "one_cycle": Schedule(f"{_IN}:cosine"),
        "plateau": Schedule(f"{_IN}:plateau", ("gamma", "plateau"), is_measured=True),
        "noise_scale": Schedule(f"{_IN}:by_noise_scale", is_measured=True),
        "piecewise": Schedule(f"{_IN}:piecewise", ("phases",), is_measured=True),
    },
)

SETTINGS_OF_SOME = (
    "decay_steps",
    "power",
    "exponent",
    "gamma",
    "period_steps",
    "milestones",
    "cycle_shape",
    "timescale_steps",
    "plateau",
    "phases",
)
"""That only some schedules read."""
