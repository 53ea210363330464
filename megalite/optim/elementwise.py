"""Rules whose update of a number depends on nothing but that number's own history: AdamW, plain or without a schedule,
Lion, SGD.

Each works on lists of flat tensors, so any cut of the weights is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megalite.config.optimizers import LEAD
from megalite.config.schema import OptimizerConfig

States = dict[str, list[Tensor]]
"""The rule's state by kind, one tensor a weight tensor."""


class ElementwiseRule(Protocol):
    """Updates weights and state in place."""

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], states: States, *, lr: float, decay: float, step: int
    ) -> None:
        """One step, counted from 1; `decay` is decoupled, and `lr` is that of these weights."""
        ...


class AdamW:
    """AdamW (Loshchilov & Hutter 2019), torch's fused implementation."""

    def __init__(self, optimizer: OptimizerConfig):
        self.betas, self.eps = optimizer.betas, optimizer.eps

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], states: States, *, lr: float, decay: float, step: int
    ) -> None:
        steps = torch.full((len(weights),), step - 1.0, device=weights[0].device)  # torch counts them up
        adamw(
            weights,
            gradients,
            states["exp_avg"],
            states["exp_avg_sq"],
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )


class Lion:
    """Lion (Chen et al. 2023, algorithm 2): the sign of a momentum that looks one gradient ahead."""

    def __init__(self, optimizer: OptimizerConfig):
        self.betas = optimizer.betas

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], states: States, *, lr: float, decay: float, step: int
    ) -> None:
        momenta = states["exp_avg"]
        directions = torch._foreach_lerp(gradients, momenta, self.betas[0])
        torch._foreach_sign_(directions)
        shrink_and_add(weights, directions, lr=lr, decay=decay)
        torch._foreach_lerp_(momenta, gradients, 1.0 - self.betas[1])


class Sgd:
    """SGD with momentum as torch has it, Nesterov's or plain, with decoupled decay."""

    def __init__(self, optimizer: OptimizerConfig):
        self.momentum, self.nesterov = optimizer.momentum, optimizer.nesterov

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], states: States, *, lr: float, decay: float, step: int
    ) -> None:
        momenta = states["momentum"]
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, gradients)
        directions: Sequence[Tensor] = momenta
        if self.nesterov:
            directions = torch._foreach_add(gradients, momenta, alpha=self.momentum)
        shrink_and_add(weights, directions, lr=lr, decay=decay)


class ScheduleFreeAdamW:
    """Schedule-free AdamW (Defazio et al. 2024, algorithm 1): the momentum is a pull toward the mean of all z.

    With D = lr (g / (sqrt(v) + eps) + decay y), where v is the second moment without its bias, and c the share:

        z - x  <-  (1 - c) (z - x - D)
        y      <-  y - (1 - beta (1 - c)) D + beta c (z - x)          with the former z - x

    which are z <- z - D, x <- (1 - c) x + c z, y = (1 - beta) z + beta x, told of y and z - x.
    """

    def __init__(self, optimizer: OptimizerConfig):
        self.betas, self.eps = optimizer.betas, optimizer.eps

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: States,
        *,
        lr: float,
        decay: float,
        step: int,
        share: float,
    ) -> None:
        """One step; `share` is that of the newest z in the mean, c."""
        (beta, second), leads, squares = self.betas, states[LEAD], states["exp_avg_sq"]
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - second)
        directions = torch._foreach_div(squares, 1.0 - second**step)
        torch._foreach_sqrt_(directions)
        torch._foreach_add_(directions, self.eps)
        for gradient, direction in zip(gradients, directions, strict=True):
            torch.div(gradient, direction, out=direction)
        if decay:
            torch._foreach_add_(directions, weights, alpha=decay)
        torch._foreach_add_(weights, directions, alpha=-lr * (1.0 - beta * (1.0 - share)))
        torch._foreach_add_(weights, leads, alpha=beta * share)
        torch._foreach_add_(leads, directions, alpha=-lr)
        torch._foreach_mul_(leads, 1.0 - share)


class Frozen:
    """No update at all."""

    def __init__(self, optimizer: OptimizerConfig):
        """Nothing of the section matters."""

    def update(
        self, weights: list[Tensor], gradients: list[Tensor], states: States, *, lr: float, decay: float, step: int
    ) -> None:
        """Leave the weights as they are."""


def shrink_and_add(weights: list[Tensor], directions: Sequence[Tensor], *, lr: float, decay: float) -> None:
    """Decoupled decay, then a step of length `lr` against the directions."""
    if decay:
        torch._foreach_mul_(weights, 1.0 - lr * decay)
    torch._foreach_add_(weights, list(directions), alpha=-lr)
