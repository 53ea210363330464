"""fp16's dynamic loss scaling (Micikevicius et al. 2018, section 3.2): gradients are made of a loss that is multiplied,
so that small ones do not vanish, and divided again before the update.

The scale doubles after some steps without an overflow; one is borne, the next halves it, and the step is left out. A
fixed scale does neither. What is remembered has the names of `engine.protocol.LossScaling`.
"""

from __future__ import annotations

from megalite.config.schema import Config
from megalite.config.sections.precision import LossScaleConfig
from megalite.engine.protocol import LossScaling


def choose_scaler(config: Config) -> LossScaler | None:
    """The scaler of an engine of ours; None where nothing is scaled."""
    return LossScaler(config.precision.loss_scale) if config.precision.dtype == "fp16" else None


class LossScaler:
    """The scale and what it goes by."""

    def __init__(self, settings: LossScaleConfig):
        self._settings = settings.search
        self.scale = self._settings.initial
        self.num_steps = 0
        self.last_overflow = -1
        """The step, counted from 0; -1 before the first."""
        self.overflows_to_bear = self._settings.hysteresis

    def state(self) -> LossScaling:
        return {name: getattr(self, name) for name in ("scale", "num_steps", "last_overflow", "overflows_to_bear")}

    def load(self, state: LossScaling) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def update(self, *, has_overflowed: bool) -> None:
        """A step is over."""
        if has_overflowed:
            if self.overflows_to_bear == 1:
                self.scale = max(self.scale / 2.0, self._settings.minimum)
            else:
                self.overflows_to_bear -= 1
            self.last_overflow = self.num_steps
        elif (num_good := self.num_steps - self.last_overflow - 1) > 0 and num_good % self._settings.window == 0:
            self.overflows_to_bear = self._settings.hysteresis
            self.scale *= 2.0
        self.num_steps += 1
