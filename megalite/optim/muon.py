"""Muon: momentum whose matrix is orthogonalised (Jordan 2024), scaled as in Moonlight (Liu et al. 2025, equation 4).

    M = momentum M + (1 - momentum) G        with Nesterov: G + momentum (M - G) goes on
    O = Newton-Schulz(M) ~ U V'              all singular values near 1
    W = W (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) O

The factor gives the update the root mean square of AdamW's, so that rates and decay tuned for AdamW hold. Only matrices
of blocks are updated so, and each by itself: query, key and value, gate and up, although they are stored together.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.config.schema import OptimizerConfig
from megalite.optim.exchange import Unit
from megalite.optim.whole import Placed, WholeRule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration a X + b (XX')X + c (XX')^2 X, tuned for speed: singular values end near 1, between 0.7 and
1.2 (Jordan 2024)."""

NORM_FLOOR = 1e-7
"""A matrix with a smaller norm is not scaled up to 1."""

ADAMW_RMS = 0.2
"""Typical root mean square of an AdamW update, before the learning rate (Liu et al. 2025, section 2.2)."""


class Muon(WholeRule):
    """See the module. Products are in `product_dtype`, in which the momentum travels too."""

    def __init__(self, optimizer: OptimizerConfig, product_dtype: torch.dtype):
        self.momentum, self.nesterov = optimizer.momentum, optimizer.nesterov
        self.steps, self.wire_dtype = optimizer.newton_schulz_steps, product_dtype

    def cost(self, unit: Unit) -> float:
        return cost_of_orthogonal(unit)

    def outgoing(self, gradients: list[Tensor], states: dict[str, list[Tensor]]) -> list[Tensor]:
        momenta = states["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1.0 - self.momentum)
        if not self.nesterov:
            return [momentum.to(self.wire_dtype) for momentum in momenta]
        both = zip(gradients, momenta, strict=True)
        return [gradient.lerp(momentum, self.momentum).to(self.wire_dtype) for gradient, momentum in both]

    def incoming(self, weight: Weight, direction: Tensor) -> Tensor:
        return scaled_as_adamw(weight, direction)

    def start(self, unit: Unit, device: torch.device) -> None:
        """Nothing: the momentum is cut as the weights are."""

    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        return orthogonalize(whole, self.steps)

    def state(self, unit: Unit) -> Placed:
        return {}

    def load(self, unit: Unit, read: Callable[[str, Rectangle, tuple[int, ...]], Tensor]) -> None:
        """Nothing."""


def cost_of_orthogonal(unit: Unit) -> float:
    """The work of a matrix, in any measure."""
    short, long = sorted(unit.shape)
    return float(short * short * (2 * long + short))


def scaled_as_adamw(weight: Weight, direction: Tensor) -> Tensor:
    """A part of an orthogonal matrix with the root mean square of AdamW's updates; changes fp32 in place."""
    return direction.float().mul_(ADAMW_RMS * max(weight.shape) ** 0.5)  # fp32, else the factor would round again


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """The nearest matrix with singular values near 1, by Newton-Schulz iteration in the matrix' own format."""
    a, b, c = COEFFICIENTS
    assert matrix.dim() == 2
    assert prod(matrix.shape) > 0
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    x = x / x.norm().clamp(min=NORM_FLOOR)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if is_tall else x
