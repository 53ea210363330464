"""Rules whose update of a number depends on nothing but that number's own history: AdamW, Lion, SGD.

Each works on lists of flat tensors, so any cut of the weights is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
