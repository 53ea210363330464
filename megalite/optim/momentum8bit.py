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
from megalite.optim.slices import chunks
from megalite.optim.whole import Placed, WholeRule

Step = Callable[[Tensor, Tensor], Tensor]
"""Of some numbers, from their gradient and momentum to their direction; moves the momentum."""

Read = Callable[[str, Rectangle, tuple[int, ...]], Tensor]


class PackedMomenta:
    """The momenta of units in 8 bits; in checkpoints of a kind, as whole weights in fp32."""

    def __init__(self, kind: str):
        self._kind = kind
        self.packed: dict[tuple[str, int, int], Packed] = {}

    def start(self, unit: Unit, device: torch.device) -> None:
        """Zeros."""
        self.packed[_key(unit)] = zeros(prod(unit.shape), signed=True, device=device)

    def advance(self, unit: Unit, whole: Tensor, step: Step, dtype: torch.dtype) -> Tensor:
        """A unit's direction, as a step makes it of gradient and momentum, which it moves; a chunk is in fp32 at a
        time."""
        packed, gradient, direction = self.packed[_key(unit)], whole.reshape(-1), torch.empty_like(whole, dtype=dtype)
        for run in chunks(gradient):
            momentum = unpack(of_run := packed.part(run))
            direction.view(-1)[run] = step(gradient[run], momentum)
            pack(momentum, of_run)
        return direction

    def state(self, unit: Unit) -> Placed:
        """As checkpoints hold it."""
        return {self._kind: (unit.rectangle, unpack(self.packed[_key(unit)]).view(unit.shape))}

    def load(self, unit: Unit, read: Read) -> None:
        """Set it from there."""
        packed = self.packed[_key(unit)]
        pack(read(self._kind, unit.rectangle, unit.weight.shape).reshape(-1).to(packed.codes.device), packed)


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
        ahead = self._momenta.advance(unit, whole, self._ahead, self._product_dtype)
        return orthogonalize(ahead, self.steps).to(self.wire_dtype)

    def _ahead(self, gradient: Tensor, momentum: Tensor) -> Tensor:
        momentum.lerp_(gradient, 1.0 - self.momentum)
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum

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
        return self._momenta.advance(unit, whole, self._signs, self.wire_dtype)

    def _signs(self, gradient: Tensor, momentum: Tensor) -> Tensor:
        signs = gradient.lerp(momentum, self.betas[0]).sign_()
        momentum.lerp_(gradient, 1.0 - self.betas[1])
        return signs

    def state(self, unit: Unit) -> Placed:
        return self._momenta.state(unit)

    def load(self, unit: Unit, read: Read) -> None:
        self._momenta.load(unit, read)


def _key(unit: Unit) -> tuple[str, int, int]:
    return unit.weight.name, unit.replica, unit.first_row
