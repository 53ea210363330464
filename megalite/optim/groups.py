"""How fast each weight moves: factors on the learning rate, and decay."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Weight
from megalite.config.schema import OptimizerConfig
from megalite.optim.mup import rate_factor
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
    scales, is_inner = optimizer.lr_scales, weight.layer.startswith("blocks.")
    scale = 1.0
    if weight.layer == "embedding":
        scale = scales.embedding * scales.layer_decay**model.num_layers
    elif weight.layer == "head":
        scale = scales.head
    elif is_inner:
        scale = scales.layer_decay ** (model.num_layers - 1 - int(weight.layer.split(".")[1]))
    if not weight.decay:
        scale *= scales.vectors
    decays = weight.decay and (optimizer.decay_embeddings or is_inner)
    by_width = rate_factor(weight, model, rule_of(weight, optimizer))
    return Rates(scale * by_width, optimizer.weight_decay / by_width if decays else 0.0)
