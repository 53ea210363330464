"""Signum (Bernstein et al. 2018): the sign of a momentum. Norms, biases and tables are AdamW's."""

from torch import Tensor

from megalite import extend


@extend.optimizer("signum", state=("momentum",), tables="adamw", vectors="adamw")
class Signum:
    def __init__(self, *, beta: float = 0.9):
        self.beta = beta

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: dict[str, list[Tensor]],
        *,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        for weight, gradient, momentum in zip(weights, gradients, states["momentum"], strict=True):
            momentum.lerp_(gradient, 1.0 - self.beta)
            weight.mul_(1.0 - lr * decay).add_(momentum.sign(), alpha=-lr)
