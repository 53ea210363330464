"""How fast each weight moves: factors on the learning rate, and decay.

Under muP rates go by width too, for each weight and the rule that updates it: an update must change what a matrix puts
out by as much at any width. With m times as many inputs (`input_multiplier`):

    adamw, adamw8bit, lion  numbers of the update have size lr, all of one sign along the input: lr / m
    muon                    its update has root mean square lr and full rank, so it grows by sqrt(m) only: lr / sqrt(m)

The second is the spectral condition (Yang et al. 2023) for an update that is scaled as Moonlight's. A weight decays by
the product of its rate and its decay, and that product is kept: decay is multiplied by what the rate is divided by.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.architecture.architecture import Architecture
from megalite.architecture.mup import input_multiplier
from megalite.architecture.weights import Weight
from megalite.config.optimizers import RULES
from megalite.config.schema import OptimizerConfig
from megalite.optim.rules import rule_of


@dataclass(frozen=True)
class Rates:
    """How fast a weight moves."""

    lr_scale: float
    """Factor on the learning rate of the step."""
    weight_decay: float
    """Decoupled: the weight shrinks by this times its own learning rate."""


def rates_of(weight: Weight, optimizer: OptimizerConfig, model: Architecture) -> Rates:
    """Learning-rate factor and decay of a weight: matrices decay, norms and biases do not; under muP, by width.

    With `layer_decay` d, block i of n has the factor d^(n - 1 - i), embedding tables that of the lowest block times d.
    """
    scales, is_inner = optimizer.lr_scales, weight.is_inner
    scale = 1.0
    if weight.layer == "embedding":
        scale = scales.embedding * scales.layer_decay**model.num_layers
    elif weight.layer == "head":
        scale = scales.head
    elif weight.layer.startswith("blocks."):
        scale = scales.layer_decay ** (model.num_layers - 1 - int(weight.layer.split(".")[1]))
    if not weight.decay:
        scale *= scales.vectors
    decays = weight.decay and (optimizer.decay_embeddings or is_inner)
    by_width = rate_factor(weight, model, rule_of(weight, optimizer))
    return Rates(scale * by_width, optimizer.weight_decay / by_width if decays else 0.0)


def rate_factor(weight: Weight, model: Architecture, rule: str) -> float:
    """Factor on the learning rate of a weight; its decay is divided by it."""
    exponent = RULES[rule].rate_exponent
    return 1.0 if model.mup is None or exponent is None else input_multiplier(weight, model) ** -exponent
