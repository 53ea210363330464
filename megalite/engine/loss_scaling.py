"""fp16's dynamic loss scaling (Micikevicius et al. 2018, section 3.2): gradients are made of a loss that is multiplied,
so that small ones do not vanish, and divided again before the update.

The scale doubles after a thousand steps without an overflow; one is borne, the next halves it, and the step is left
out. What it remembers has the names of `engine.protocol.LossScaling`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megalite.engine.protocol import LossScaling

WINDOW = 1000
"""Good steps until the scale doubles."""
TO_BEAR = 2
"""Overflows, the last one counted, until it is halved."""


@dataclass
class LossScaler:
    """The scale and what it goes by."""

    scale: float = 2.0**16
    num_steps: int = 0
    last_overflow: int = -1
    """The step, counted from 0; -1 before the first."""
    overflows_to_bear: int = TO_BEAR

    def state(self) -> LossScaling:
        return asdict(self)

    def load(self, state: LossScaling) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def update(self, *, has_overflowed: bool) -> None:
        """A step is over."""
        if has_overflowed:
            if self.overflows_to_bear == 1:
                self.scale = max(self.scale / 2.0, 1.0)
            else:
                self.overflows_to_bear -= 1
            self.last_overflow = self.num_steps
        elif (num_good := self.num_steps - self.last_overflow - 1) > 0 and num_good % WINDOW == 0:
            self.overflows_to_bear = TO_BEAR
            self.scale *= 2.0
        self.num_steps += 1
