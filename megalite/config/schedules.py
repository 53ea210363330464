"""Learning-rate schedules by name: where each is computed, and what it reads of `schedule`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.plugins import Addition, Table


@dataclass(frozen=True)
class Schedule:
    """A shape of the rate after warmup."""

    rate: str | Addition | None
    """`module:name` of `(k, n, peak, schedule)`, the rate of the k-th step after warmup, of n; of a plug-in,
    `(k, n, peak, min_lr)`. None: the rate depends on more than the step (`plateau`)."""
    settings: tuple[str, ...] = ()
    """Keys of the section that it reads, of those that not all do."""
    period: str = ""
    """What `period_steps` is to it, where it must have one."""


SCHEDULES: Table[Schedule] = Table(
    "schedule",
    {
        "constant": Schedule("megalite.optim.schedules:constant", ("decay_steps",)),
        "linear": Schedule("megalite.optim.schedules:linear"),
        "cosine": Schedule("megalite.optim.schedules:cosine"),
        "polynomial": Schedule("megalite.optim.schedules:polynomial", ("power",)),
        "exponential": Schedule(
            "megalite.optim.schedules:exponential",
            ("gamma", "period_steps"),
            period="the steps in which the rate falls by gamma",
        ),
        "step": Schedule(
            "megalite.optim.schedules:step",
            ("gamma", "period_steps", "milestones"),
            period="the steps between drops, or milestones",
        ),
        "inverse_sqrt": Schedule("megalite.optim.schedules:inverse_sqrt", ("timescale_steps",)),
        "wsd": Schedule("megalite.optim.schedules:hold_then_decay", ("decay_steps",)),
        "cyclical": Schedule(
            "megalite.optim.schedules:cyclical",
            ("gamma", "period_steps", "cycle_shape"),
            period="the steps of a cycle",
        ),
        "one_cycle": Schedule("megalite.optim.schedules:cosine"),
        "plateau": Schedule(None, ("gamma", "plateau")),
    },
)

SETTINGS_OF_SOME = (
    "decay_steps",
    "power",
    "gamma",
    "period_steps",
    "milestones",
    "cycle_shape",
    "timescale_steps",
    "plateau",
)
"""That only some schedules read."""
