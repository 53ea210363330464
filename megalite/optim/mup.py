"""Learning rates by width under muP, for each weight and the rule that updates it.

An update must change what a matrix puts out by as much at any width. With m times as many inputs (`input_multiplier`):

    adamw, adamw8bit, lion  numbers of the update have size lr, all of one sign along the input: lr / m
    muon                    its update has root mean square lr and full rank, so it grows by sqrt(m) only: lr / sqrt(m)

The second is the spectral condition (Yang et al. 2023) for an update that is scaled as Moonlight's. A weight decays by
the product of its rate and its decay, and that product is kept: decay is multiplied by what the rate is divided by.
"""

from __future__ import annotations

from megalite.architecture.architecture import Architecture
from megalite.architecture.mup import input_multiplier
from megalite.architecture.weights import Weight
from megalite.config.optimizers import RULES


def rate_factor(weight: Weight, model: Architecture, rule: str) -> float:
    """Factor on the learning rate of a weight; its decay is divided by it."""
    exponent = RULES[rule].rate_exponent
    return 1.0 if model.mup is None or exponent is None else input_multiplier(weight, model) ** -exponent
