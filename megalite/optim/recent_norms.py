"""Clipping to a percentile of recent gradient norms (AutoClip, Seetharaman et al. 2020).

A run's norms fall by orders of magnitude; a fixed bound is loose late or tight early. The bound of a step comes from
the steps before it: its own norm is known only when clipping has begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megalite.config.schema import OptimizerConfig
from megalite.config.sections.optimizer import MIN_NORMS


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
