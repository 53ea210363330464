"""How fast each weight moves: factors on the learning rate, and decay.

Under muP rates go by width too, for each weight and the rule that updates it: an update must change what a matrix puts
out by as much at any width. With m times as many inputs (`input_multiplier`):

    adamw, lion   numbers of the update have size lr, all of one sign along the input: lr / m
    muon          its update has root mean square lr and full rank, so it grows by sqrt(m) only: lr / sqrt(m)

State of 8 bits changes nothing in that, nor do averages of adamw's steps. The second is the spectral condition (Yang et
al. 2023) for an update that is scaled as Moonlight's. A weight decays by the product of its rate and its decay, and
that product is kept: decay is multiplied by what the rate is divided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megalite.architecture.architecture import Architecture
from megalite.architecture.mup import input_multiplier
from megalite.architecture.weights import Weight
from megalite.config.optimizers import RULES
from megalite.config.schema import OptimizerConfig
from megalite.config.weight_groups import group_number
from megalite.optim.rules import rule_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """How fast a weight moves."""

    lr_scale: float
    """Factor on the learning rate of the step."""
    weight_decay: float
    """The weight shrinks by this times its own learning rate; where it is coupled, this times the weight is added to
    the gradient."""
    is_coupled: bool = False
    group: int | None = None
    """Of `optimizer.groups`, where that has a schedule of its own."""


@dataclass(frozen=True)
class Pacing:
    """What a step has besides the run's learning rate."""

    decay_scale: float = 1.0
    """Factor on every decay."""
    lr_of_groups: Mapping[int, float] = field(default_factory=dict)
    """The rate of groups that have a schedule of their own, by their number; of others, and where it is not known, it
    is the run's."""
    row_scales: Mapping[str, Tensor] = field(default_factory=dict)
    """Factors of rows of weights behind the update, by canonical name (`optim.qk_clip`)."""


def rates_of(weight: Weight, optimizer: OptimizerConfig, model: Architecture) -> Rates:
    """Learning-rate factor and decay of a weight: matrices decay, norms and biases do not; under muP, by width."""
    number = group_number(weight.name, optimizer)
    group = None if number is None else optimizer.groups[number]
    scale = _scale_of_kind(weight, optimizer, model) * (1.0 if group is None else group.lr_scale)
    by_width = rate_factor(weight, model, rule_of(weight, optimizer))
    decays = weight.decay and (optimizer.decay_embeddings or weight.is_inner)
    decay = optimizer.weight_decay if decays else 0.0
    if group is not None and group.weight_decay is not None:
        decay = group.weight_decay
    decay *= optimizer.decay.layer_factor ** _blocks_from_head(weight, model)
    if optimizer.decay.kind == "independent":
        decay /= optimizer.lr * scale
    has_schedule = group is not None and group.schedule is not None
    is_coupled = optimizer.decay.kind == "coupled"
    return Rates(scale * by_width, decay / by_width, is_coupled, number if has_schedule else None)


def rate_factor(weight: Weight, model: Architecture, rule: str) -> float:
    """Factor on the learning rate of a weight; its decay is divided by it."""
    exponent = RULES[rule].rate_exponent
    return 1.0 if model.mup is None or exponent is None else input_multiplier(weight, model) ** -exponent


def _scale_of_kind(weight: Weight, optimizer: OptimizerConfig, model: Architecture) -> float:
    """What `lr_scales` makes of a weight: by its kind, and by its block."""
    scales = optimizer.lr_scales
    scale = scales.layer_decay ** _blocks_from_head(weight, model)
    if weight.layer == "embedding":
        scale *= scales.embedding
    elif weight.layer == "head":
        scale *= scales.head
    return scale if weight.decay else scale * scales.vectors


def _blocks_from_head(weight: Weight, model: Architecture) -> int:
    """Blocks between a weight and the head: none for the last block and what is behind it, all for the embedding."""
    if weight.layer == "embedding":
        return model.num_layers
    if weight.layer.startswith("blocks."):
        return model.num_layers - 1 - int(weight.layer.split(".")[1])
    return 0
