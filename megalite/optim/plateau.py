"""Lowering the learning rate when the validation loss has stalled: the one schedule that has a state.

The state is a few numbers, a function of the losses so far, and goes into checkpoints with the run's progress.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.config.schema import PlateauConfig


@dataclass(frozen=True)
class Plateau:
    """What is known after some validations."""

    num_cuts: int = 0
    """How often the rate was lowered."""
    best: float | None = None
    """The lowest loss; None before the first."""
    num_worse: int = 0
    """Validations in a row without a new best."""
    num_spared: int = 0
    """Coming validations that are not judged, because the rate was lowered just now."""


def judge(state: Plateau, loss: float, settings: PlateauConfig) -> Plateau:
    """The state after one more validation, by the rules of torch's ReduceLROnPlateau (`mode=min`, relative threshold).

    A loss that is not a number is no new best.
    """
    is_best = state.best is None or loss < state.best * (1.0 - settings.threshold)
    state = replace(state, best=loss, num_worse=0) if is_best else replace(state, num_worse=state.num_worse + 1)
    if state.num_spared:
        state = replace(state, num_spared=state.num_spared - 1, num_worse=0)
    if state.num_worse > settings.patience:
        state = replace(state, num_cuts=state.num_cuts + 1, num_worse=0, num_spared=settings.cooldown)
    return state
