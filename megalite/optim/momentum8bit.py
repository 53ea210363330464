"""Muon and Lion with a momentum of 8 bits (Dettmers et al. 2022): one byte a number where fp32 takes four.

Blocks are 256 numbers of the canonical weight, row by row, as 8-bit AdamW has them: every layout rounds alike. A step
works with the momentum as it has just been made, and the next one with what 8 bits have kept of it. What travels is the
gradient, in fp32, to whoever keeps the momentum. Checkpoints hold it in fp32, under the names of plain Muon and Lion.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.config.schema import OptimizerConfig
from megalite.optim.exchange import Unit
from megalite.optim.muon import cost_of_orthogonal, orthogonalize, scaled_as_adamw
from megalite.optim.quantize import Packed, pack, unpack, zeros
from megalite.optim.rules import unit_rows
from megalite.optim.whole import Placed, WholeRule

Read = Callable[[str, Rectangle, tuple[int, ...]], Tensor]


class PackedMomenta:
    """The momenta of units in 8 bits; in checkpoints of a kind, as whole weights in fp32."""

    def __init__(self, kind: str):
        self._kind = kind
        self.packed: dict[tuple[str, int, int], Packed] = {}

    def start(self, unit: Unit, device: torch.device) -> None:
        """Zeros."""
        self.packed[_key(unit)] = zeros(prod(unit.shape), signed=True, device=device)

    def numbers(self, unit: Unit) -> Tensor:
        """A unit's, fp32."""
        return unpack(self.packed[_key(unit)]).view(unit.shape)

    def keep(self, unit: Unit, momentum: Tensor) -> None:
        """What 8 bits keep of it."""
        pack(momentum.reshape(-1), self.packed[_key(unit)])

    def state(self, unit: Unit) -> Placed:
        """As checkpoints hold it."""
        return {self._kind: (unit.rectangle, self.numbers(unit))}

    def load(self, unit: Unit, read: Read) -> None:
        """Set it from there."""
        device = self.packed[_key(unit)].codes.device
        self.keep(unit, read(self._kind, unit.rectangle, unit.weight.shape).to(device))


class Muon8bit(WholeRule):
    """Muon whose momentum is kept by the owner of a matrix."""

    is_state_live = False

    def __init__(self, optimizer: OptimizerConfig, product_dtype: torch.dtype):
        self.momentum, self.nesterov = optimizer.momentum, optimizer.nesterov
        self.steps, self._product_dtype = optimizer.newton_schulz_steps, product_dtype
        self._momenta = PackedMomenta("momentum")

    def cost(self, unit: Unit) -> float:
        return cost_of_orthogonal(unit)

    def incoming(self, weight: Weight, direction: Tensor) -> Tensor:
        return scaled_as_adamw(weight, direction)

    def start(self, unit: Unit, device: torch.device) -> None:
        self._momenta.start(unit, device)

    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        momentum = self._momenta.numbers(unit).lerp_(whole, 1.0 - self.momentum)
        self._momenta.keep(unit, momentum)
        ahead = whole.lerp(momentum, self.momentum) if self.nesterov else momentum
        return orthogonalize(ahead.to(self._product_dtype), self.steps).to(self.wire_dtype)

    def state(self, unit: Unit) -> Placed:
        return self._momenta.state(unit)

    def load(self, unit: Unit, read: Read) -> None:
        self._momenta.load(unit, read)


class Lion8bit(WholeRule):
    """Lion whose momenta are kept by the owners of units, runs of rows of at most `UNIT_NUMBERS` numbers."""

    is_state_live = False

    def __init__(self, optimizer: OptimizerConfig):
        self.betas = optimizer.betas
        self._momenta = PackedMomenta("exp_avg")

    def rows_of_units(self, weight: Weight) -> list[tuple[int, int]]:
        return unit_rows(weight)

    def start(self, unit: Unit, device: torch.device) -> None:
        self._momenta.start(unit, device)

    def direction(self, unit: Unit, whole: Tensor, step: int) -> Tensor:
        momentum = self._momenta.numbers(unit)
        direction = whole.lerp(momentum, self.betas[0]).sign_()
        self._momenta.keep(unit, momentum.lerp_(whole, 1.0 - self.betas[1]))
        return direction

    def state(self, unit: Unit) -> Placed:
        return self._momenta.state(unit)

    def load(self, unit: Unit, read: Read) -> None:
        self._momenta.load(unit, read)


def _key(unit: Unit) -> tuple[str, int, int]:
    return unit.weight.name, unit.replica, unit.first_row
