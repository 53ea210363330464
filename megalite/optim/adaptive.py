"""What a run measures decides here: the rate on a plateau of the validation loss, clipping by recent gradient norms.

Both are a few numbers of state, functions of what was measured so far; they go into checkpoints.

Clipping to a percentile is AutoClip (Seetharaman et al. 2020): norms fall by orders of magnitude over a run, so a fixed
bound is loose late or tight early. The bound of a step comes from the steps before it: its own norm is known only when
clipping has begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megalite.config.schema import OptimizerConfig, PlateauConfig
from megalite.config.sections.optimizer import MIN_NORMS


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
    """Coming validations that do not count, because the rate was lowered just now."""


def after_validation(state: Plateau, loss: float, settings: PlateauConfig) -> Plateau:
    """The state after one more validation, by the rules of torch's ReduceLROnPlateau (`mode=min`, relative threshold).

    A loss that is not a number is no new best, nor is one without bound.
    """
    best = math.inf if state.best is None else state.best
    is_best = loss < best * (1.0 - settings.threshold)
    state = replace(state, best=loss, num_worse=0) if is_best else replace(state, num_worse=state.num_worse + 1)
    if state.num_spared:
        state = replace(state, num_spared=state.num_spared - 1, num_worse=0)
    if state.num_worse > settings.patience:
        state = replace(state, num_cuts=state.num_cuts + 1, num_worse=0, num_spared=settings.cooldown)
    return state


def clip_bound(norms: Sequence[float], optimizer: OptimizerConfig) -> float | None:
    """The largest gradient norm of the coming step, or None; `clip_grad_norm` bounds it from above.

    Args:
        norms: of recent steps, before clipping.
    """
    clip = optimizer.clip
    if clip is None or clip.by != "percentile" or len(norms) < MIN_NORMS:
        return optimizer.clip_grad_norm
    bound = float(np.percentile(norms, clip.threshold))
    return bound if optimizer.clip_grad_norm is None else min(bound, optimizer.clip_grad_norm)


def remember(norms: Sequence[float], norm: float, optimizer: OptimizerConfig) -> list[float]:
    """The recent norms after a step; one that is not finite is forgotten. Empty where nothing goes by them."""
    clip = optimizer.clip
    if clip is None or clip.by != "percentile":
        return []
    return [*norms, norm][-clip.window :] if math.isfinite(norm) else list(norms)
