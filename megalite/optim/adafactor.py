"""Adafactor (Shazeer & Stern 2018): the second moment of a matrix as the product of a row and a column.

    R, C   moving means of G^2 over columns and over rows, decaying by 1 - step^-0.8
    U      G / sqrt(R C' / mean(R)), divided by max(1, rms(U) / update_clip)

As language models are pretrained with it: no first moment, the learning rate from the schedule, not from the size of
the weights. Norms and biases keep their second moment whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle
from megalite.config.schema import OptimizerConfig
from megalite.optim.exchange import Unit
from megalite.optim.whole import Placed, WholeRule, all_of

SQUARE_FLOOR = 1e-30
"""Added to squared gradients (the paper's epsilon 1)."""


class Adafactor(WholeRule):
    """See the module. Each weight's factors live with the owner of its unit."""

    def __init__(self, optimizer: OptimizerConfig):
        self.decay, self.clip = optimizer.factored_decay, optimizer.update_clip
        self._states: dict[tuple[str, int], dict[str, Tensor]] = {}

    def start(self, unit: Unit, device: torch.device) -> None:
        shapes = {"exp_avg_sq": unit.shape}
        if len(unit.shape) > 1:
            shapes = {"exp_avg_sq_row": unit.shape[:1], "exp_avg_sq_col": unit.shape[1:]}
        state = {kind: torch.zeros(shape, device=device) for kind, shape in shapes.items()}
        self._states[unit.weight.name, unit.replica] = state

    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        state, keep = self._states[unit.weight.name, unit.replica], 1.0 - step**-self.decay
        squares = whole.square().add_(SQUARE_FLOOR)
        if "exp_avg_sq" in state:
            update = state["exp_avg_sq"].lerp_(squares, 1.0 - keep).rsqrt() * whole
        else:
            row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            row.lerp_(squares.mean(dim=1), 1.0 - keep)
            column.lerp_(squares.mean(dim=0), 1.0 - keep)
            del squares
            update = (whole * (row / row.mean()).rsqrt_().unsqueeze(1)).mul_(column.rsqrt())
        rms = update.norm() / update.numel() ** 0.5
        return update.div_((rms / self.clip).clamp_(min=1.0))

    def state(self, unit: Unit) -> Placed:
        tensors = self._states[unit.weight.name, unit.replica]
        return {kind: (all_of(tensor), tensor) for kind, tensor in tensors.items()}

    def load(self, unit: Unit, read: Callable[[str, Rectangle, tuple[int, ...]], Tensor]) -> None:
        for kind, (place, tensor) in self.state(unit).items():
            tensor.copy_(read(kind, place, tuple(tensor.shape)))
