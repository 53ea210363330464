"""What a probe of a run's first steps has seen, and what its first loss should be. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProbeReport:
    """Numbers of the first steps; the same on all ranks."""

    loss: float
    """Of the first step, before any update."""
    grad_norm: float
    vocab_size: int
    logit_variance: float
    """Of a fresh head's logits: hidden_size x the variance of its weights x (factors of the output)^2."""
    origin: str
    """What the weights are."""
    is_fresh: bool
    num_weights: int
    silent: list[str]
    """Weights whose gradient is zero in every number, without frozen ones."""
    seconds: float
    """Of a step, the median of a few; NaN where none was timed."""
    overfit: list[float] = field(default_factory=list)
    """The loss of the first batch, trained on alone."""


def expected_first_loss(report: ProbeReport) -> float:
    """log V, and half the variance of logits that are normal and know nothing: the mean of -log softmax."""
    return math.log(report.vocab_size) + report.logit_variance / 2.0
