"""The section `schedule`: the learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalite.config.brought import wrong_options
from megalite.config.schedules import SCHEDULES
from megalite.section import FrozenOptions, Options, Problem, Section

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class PlateauConfig(Section):
    """When `plateau` lowers the rate: as torch's ReduceLROnPlateau, on the validation loss."""

    patience: NonNegativeInt = 3
    """Validations without a new best that are borne; the next one lowers the rate."""
    threshold: float = Field(1e-3, ge=0.0, lt=1.0)
    """A loss is a new best when it is below best x (1 - threshold)."""
    cooldown: NonNegativeInt = 0
    """Validations after a cut that do not count."""


class ShapeConfig(Section):
    """A warmup, and the shape of the rate behind it."""

    name: Annotated[str, AfterValidator(SCHEDULES.known)] = "cosine"
    """Shape after warmup: constant, linear, cosine, polynomial, exponential, step, inverse_sqrt, power, wsd, cyclical,
    one_cycle, plateau, noise_scale, piecewise, or one that a plug-in brings (docs/recipe.md says when to use which).
    linear, cosine and polynomial fall to min_lr at the last step; wsd holds the peak and falls at the end (Hu et al.
    2024)."""
    options: Options = Field(default_factory=FrozenOptions)
    """What a plug-in's schedule may be told."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup: step s uses start_lr + (lr - start_lr) x s / warmup_steps. one_cycle rises by half a
    cosine."""
    warmup_tokens: PositiveInt | None = None
    """The same in tokens, rounded up to whole steps. Give one of the three."""
    warmup_fraction: Share | None = None
    """The same as a fraction of the run's steps, rounded."""
    start_lr: NonNegativeFloat = 0.0
    """Where warmup rises from."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate of the last step, of the end of a decay, and the least of any schedule; the foot of a cycle."""
    decay_steps: PositiveInt | None = None
    """Length of the final decay. wsd: null means a tenth of the run. constant, power: null means none; with it, this
    is constant with cooldown."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Form of the final decay of wsd, constant and power; sqrt is 1 - sqrt(x) (Hägele et al. 2024)."""
    power: PositiveFloat = 2.0
    """polynomial: exponent of the remaining share of the run; 1 is linear."""
    exponent: PositiveFloat = 0.51
    """power: the rate falls as steps^-exponent, the same however long the run is (Shen et al. 2024); 0.5 is the inverse
    square root."""
    gamma: float = Field(0.5, gt=0.0, le=1.0)
    """step: factor at each drop. exponential: factor over period_steps. cyclical: factor on the height of each further
    cycle. plateau: factor at each cut."""
    period_steps: PositiveInt | None = None
    """step: steps between drops. exponential: steps in which the rate falls by gamma. cyclical: steps of a cycle."""
    milestones: tuple[PositiveInt, ...] = ()
    """step: the last step before each drop, in place of period_steps."""
    cycle_shape: Literal["triangle", "cosine"] = "triangle"
    """cyclical: up and down in straight lines (Smith 2017), or down by half a cosine and restarted (Loshchilov &
    Hutter 2017)."""
    timescale_steps: PositiveInt | None = None
    """inverse_sqrt: the rate is lr x sqrt(t / (t + steps since warmup)). power: it is lr until step t, and lr x (t /
    step)^exponent from there on. Null takes t = the steps of warmup."""
    plateau: PlateauConfig = PlateauConfig()
    """plateau: when the rate is lowered."""

    def problems(self) -> Iterator[Problem]:
        yield from wrong_options(SCHEDULES[self.name].rate, self.options, f"schedule {self.name}")


class PhaseConfig(ShapeConfig):
    """A stretch of a piecewise schedule. Its steps count from its beginning, its last one is the last of the shape."""

    until_step: PositiveInt | None = None
    """The last step of this phase. All phases but the last say where they end, in one of three ways."""
    until_tokens: PositiveInt | None = None
    """Tokens of the run at which it ends, rounded up to whole steps."""
    until_share: Share | None = None
    """Part of the run that is over when it ends."""
    lr: PositiveFloat | None = None
    """Its peak; null takes the rate at which the phase before it ends, for the first one optimizer.lr."""


class ScheduleConfig(ShapeConfig):
    """The learning rate of each step. The first update is step 1."""

    phases: tuple[PhaseConfig, ...] = ()
    """piecewise: schedules one after another, each with a warmup of its own if it has one."""
    scale_with_batch: Literal["none", "linear", "sqrt"] = "none"
    """Rates of steps whose batch is not batch.global_batch_size, as in a ramp or where it grows by its noise: as they
    are, or times (size / global_batch_size) or the root of that."""
