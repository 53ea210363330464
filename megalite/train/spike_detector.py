"""Spikes: which steps are left out, and what follows when they repeat.

    good --spike--> skipped --`cut_after` within the window--> rate cut for `cut_steps`
                                                   --`roll_back_after` more--> back to the last good checkpoint

PaLM went back some hundred steps and left out the data of a few hundred batches about twenty times, by hand (Chowdhery
et al. 2022, section 5.1); OLMo 2 skips single steps by the same measure as here. Pure arithmetic on what every rank
knows, so all ranks come to the same decision, and a restart from the saved state to the same as no restart.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Literal

from megalite.config.sections.health import SpikesConfig

Remedy = Literal["none", "cut", "roll back"]

SMALLEST_DEVIATION = 1e-3
"""Of the mean: a window of nearly equal values must not make a spike of the next one."""


class SpikeDetector:
    """Judges each step by the good ones before it.

    Args:
        settings: of the run.
        state: as `state` returned it, empty at the start of a run.
    """

    def __init__(self, settings: SpikesConfig, state: dict[str, Any]):
        self._settings = settings
        size = settings.window
        self._losses: deque[float] = deque(state.get("losses", ()), size)
        self._norms: deque[float] = deque(state.get("norms", ()), size)
        self._spikes: list[int] = list(state.get("spikes", ()))
        self.first_spike: int | None = state.get("first_spike")
        """The first spike of those that belong together; None when the run is quiet."""
        self._cut_until: int = state.get("cut_until", 0)

    def why_spike(self, loss: float, grad_norm: float) -> str:
        """Why a step is a spike; empty when it is none."""
        if len(self._losses) < self._settings.window:
            return ""
        named = (("loss", loss, self._losses), ("gradient norm", grad_norm, self._norms))
        return "; ".join(filter(None, (self._excess(name, value, past) for name, value, past in named)))

    def note(self, step: int, loss: float, grad_norm: float, *, is_spike: bool) -> Remedy:
        """Take a finished step into account.

        Returns:
            What is to be done from the next step on.
        """
        settings = self._settings
        self._spikes = [spike for spike in self._spikes if spike > step - settings.window]
        if not is_spike:
            self._losses.append(loss)
            self._norms.append(grad_norm)
            if not self._spikes and step >= self._cut_until:
                self.first_spike = None
            return "none"
        self._spikes.append(step)
        self.first_spike = self.first_spike or step
        is_cut = step <= self._cut_until
        if len(self._spikes) < (settings.roll_back_after if is_cut else settings.cut_after):
            return "none"
        self._spikes.clear()
        if is_cut:
            return "roll back"
        self._cut_until = step + settings.cut_steps
        return "cut"

    def lr_factor(self, step: int) -> float:
        """What the learning rate of a step is multiplied with."""
        return self._settings.cut_factor if step <= self._cut_until else 1.0

    @property
    def cut_until(self) -> int:
        """The last step of the latest cut; 0 when there was none."""
        return self._cut_until

    def state(self) -> dict[str, Any]:
        """All there is to go on from, ready for JSON."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "spikes": list(self._spikes),
            "first_spike": self.first_spike,
            "cut_until": self._cut_until,
        }

    def _excess(self, name: str, value: float, past: deque[float]) -> str:
        mean = statistics.fmean(past)
        deviation = max(math.sqrt(statistics.fmean((each - mean) ** 2 for each in past)), SMALLEST_DEVIATION * mean)
        sigmas = (value - mean) / deviation
        if sigmas <= self._settings.sigma:
            return ""
        return f"{name} {value:.4f} is {sigmas:.1f} sigma above the mean {mean:.4f} of the last {len(past)} good steps"
