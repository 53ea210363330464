"""AdamW with moments of 8 bits (Dettmers et al. 2022): two bytes a number where fp32 takes eight.

Blocks are 256 numbers of the canonical weight, row by row, whoever holds them: every layout rounds alike. The root of
the second moment is stored in its place, because it has half as many decades. Norms and biases stay with plain AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.config.schema import OptimizerConfig
from megalite.optim.exchange import Unit
from megalite.optim.quantize import Packed, pack, unpack, zeros
from megalite.optim.rules import unit_rows
from megalite.optim.slices import chunks
from megalite.optim.whole import Placed, WholeRule


class AdamW8bit(WholeRule):
    """See the module. Moments live with the owners of units, runs of rows of at most `UNIT_NUMBERS` numbers."""

    is_state_live = False

    def __init__(self, optimizer: OptimizerConfig):
        self.betas, self.eps = optimizer.betas, optimizer.eps
        self._moments: dict[tuple[str, int, int], tuple[Packed, Packed]] = {}

    def rows_of_units(self, weight: Weight) -> list[tuple[int, int]]:
        return unit_rows(weight)

    def start(self, unit: Unit, device: torch.device) -> None:
        size = prod(unit.shape)
        self._moments[_key(unit)] = zeros(size, signed=True, device=device), zeros(size, signed=False, device=device)

    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        first, root = self._moments[_key(unit)]
        gradient, direction = whole.reshape(-1), torch.empty_like(whole)
        for run in chunks(gradient):
            direction.view(-1)[run] = self._adam(gradient[run], first.part(run), root.part(run), step)
        return direction

    def _adam(self, gradient: Tensor, first: Packed, root: Packed, step: int) -> Tensor:
        mean = unpack(first).lerp_(gradient, 1.0 - self.betas[0])
        square = unpack(root).square_().lerp_(gradient.square(), 1.0 - self.betas[1])
        pack(mean, first)
        pack(square.sqrt(), root)
        corrections = [1.0 - beta**step for beta in self.betas]
        denominator = square.div_(corrections[1]).sqrt_().add_(self.eps)
        return mean.div_(corrections[0]).div_(denominator)

    def state(self, unit: Unit) -> Placed:
        first, root = self._moments[_key(unit)]
        moments = {"exp_avg": unpack(first), "exp_avg_sq": unpack(root).square_()}
        return {kind: (unit.rectangle, tensor.view(unit.shape)) for kind, tensor in moments.items()}

    def load(self, unit: Unit, read: Callable[[str, Rectangle, tuple[int, ...]], Tensor]) -> None:
        first, root = self._moments[_key(unit)]
        device = first.codes.device
        pack(read("exp_avg", unit.rectangle, unit.weight.shape).reshape(-1).to(device), first)
        pack(read("exp_avg_sq", unit.rectangle, unit.weight.shape).reshape(-1).to(device).sqrt(), root)


def _key(unit: Unit) -> tuple[str, int, int]:
    return unit.weight.name, unit.replica, unit.first_row
