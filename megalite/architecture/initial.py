"""What the weights of a fresh model are drawn from, as arithmetic: a distribution for each canonical weight.

    rule             matrices inside the blocks, and the head        torch.nn.init
    normal           N(0, init_std)                                  normal_
    fan_in           N(0, gain / sqrt(in))
    xavier_normal    N(0, gain sqrt(2 / (in + out)))                 xavier_normal_      (Glorot and Bengio 2010)
    xavier_uniform   U(-b, b), b = gain sqrt(6 / (in + out))         xavier_uniform_
    he_normal        N(0, gain / sqrt(in)), gain sqrt(2)             kaiming_normal_     (He et al. 2015)
    he_uniform       U(-b, b), b = gain sqrt(3 / in), gain sqrt(2)   kaiming_uniform_

`in` and `out` are those of the canonical matrix: of queries, keys, values, gate and up each by itself, and of each
expert. So the layout, and what is fused in it, changes nothing. Tables (tokens, positions) and sinks have no fans and
are N(0, init_std); `embedding_std` and `head_std` go before. Norms are 1 and biases 0. Of a low-rank adapter A is
U(-1 / sqrt(in), 1 / sqrt(in)), whatever the rule, and B 0: at first it adds nothing.

What writes to the residual stream is scaled by depth (`init_depth_scaling`), and muP divides what it widens by
sqrt(m) (`architecture.mup`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.architecture.architecture import Architecture
from megalite.architecture.mup import input_multiplier
from megalite.architecture.settings import InitConfig
from megalite.architecture.weights import Weight

GAINS = {"fan_in": 1.0, "xavier_normal": 1.0, "xavier_uniform": 1.0, "he_normal": 2.0**0.5, "he_uniform": 2.0**0.5}
"""Of rules that have one, the usual."""


@dataclass(frozen=True)
class Initial:
    """A distribution around 0."""

    std: float
    """Deviation of the numbers drawn; of the normal distribution behind them where `cut` is set."""
    cut: float | None = None
    """Numbers further from 0 than this are drawn again; None for none. In the unit of the numbers."""
    is_uniform: bool = False

    @property
    def bound(self) -> float | None:
        """No number drawn is further from 0; None for no bound."""
        return math.sqrt(3.0) * self.std if self.is_uniform else self.cut


def initial(weight: Weight, model: Architecture) -> Initial:
    """What a weight that is neither ones nor zeros is drawn from."""
    if weight.init == "adapter":
        return Initial(1.0 / math.sqrt(3.0 * weight.shape[1]), is_uniform=True)
    init = model.init
    own = own_deviation(weight, init)
    std = _deviation(weight, model) if own is None else own
    if weight.init == "residual":
        std = std / _residual_divisor(weight, model)
    std = std / input_multiplier(weight, model) ** 0.5
    if own is None and init.is_uniform and has_fans(weight):
        return Initial(std, is_uniform=True)
    if init.cut is None:
        return Initial(std)
    behind = std / cut_deviation(init.cut) if init.cut_keeps_std else std
    return Initial(behind, cut=init.cut * behind)


def own_deviation(weight: Weight, init: InitConfig) -> float | None:
    """The deviation that is set for a weight's layer by itself."""
    return {"embedding": init.embedding_std, "head": init.head_std}.get(weight.layer)


def has_fans(weight: Weight) -> bool:
    """Whether it is a matrix that multiplies, and no table."""
    return weight.is_matrix and weight.layer != "embedding"


def cut_deviation(cut: float) -> float:
    """Deviation of a standard normal distribution without what is further than `cut` from 0."""
    density = math.exp(-cut * cut / 2.0) / math.sqrt(2.0 * math.pi)
    return math.sqrt(1.0 - 2.0 * cut * density / math.erf(cut / math.sqrt(2.0)))


def _deviation(weight: Weight, model: Architecture) -> float:
    """By the rule alone."""
    rule = model.init.rule
    if rule == "normal" or not has_fans(weight):
        return model.init_std
    gain = GAINS[rule] if model.init.gain is None else model.init.gain
    fan_out, fan_in = weight.shape
    if rule.startswith("xavier"):
        return gain * math.sqrt(2.0 / (fan_in + fan_out))
    return gain / math.sqrt(fan_in)


def _residual_divisor(weight: Weight, model: Architecture) -> float:
    """sqrt(2 x layers), of the whole model or up to and with the weight's own."""
    if model.init_depth_scaling != "layer":
        return (2 * model.num_layers) ** 0.5
    kind, number = weight.layer.split(".")
    index = int(number) + (model.num_layers if kind == "mtp" else 0)
    return (2 * (index + 1)) ** 0.5
