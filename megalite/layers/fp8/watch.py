"""What FP8 does to a layer, measured in a training step: maxima, what is lost, and how far results move.

    of each operand   amax; the share that becomes zero (underflow); the share beyond the largest number (saturation);
                      the norm of what rounding changes, over the norm of the operand
    of the product    the norm of y in FP8 less y unrounded, over that of y unrounded, from the same x and weight

Measuring costs each layer a second product and some passes over its operands, so it is for a step now and then. Sums
are kept on the device and fetched once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers.fp8.quantise import Quantised, largest, spread
from megalite.layers.fp8.recipes import ROLES, Role
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce

NUMBERS, UNDERFLOW, SATURATED, CHANGED, WHOLE_SQUARE = range(5)
"""Places of an operand's sums; the last two are squared norms."""

OVER = 1 + 1e-6
"""A number is beyond the largest when it exceeds it by more than the rounding of its scale."""


@dataclass(frozen=True)
class OperandErrors:
    """What rounding did to one operand."""

    amax: float
    underflow: float
    saturation: float
    error: float


@dataclass(frozen=True)
class LayerErrors:
    """What FP8 did to one layer in one step."""

    error: float
    """Of the product."""
    operands: dict[Role, OperandErrors]

    @property
    def worst(self) -> float:
        """The error that speaks for the layer: of its product, or of its gradient's rounding."""
        gradient = self.operands.get("gradient")
        return max(self.error, gradient.error if gradient else 0.0)


class Gauge:
    """Sums of one layer on this rank."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(len(ROLES) + 1, 5, dtype=torch.float64, device=device)
        self.amax = torch.zeros(len(ROLES), device=device)

    @torch.no_grad()
    def operand(self, role: Role, x: Tensor, rounded: Quantised) -> None:
        """Take in an operand and what became of it."""
        place, exact = ROLES.index(role), x.detach().float()
        limit = spread(rounded.inverse, x.shape, rounded.tile) * (largest(rounded.data.dtype) * OVER)
        counts = (
            torch.tensor(float(x.numel()), device=x.device),
            ((rounded.data.float() == 0) & (exact != 0)).sum(),
            (exact.abs() > limit).sum(),
            (rounded.dequantise() - exact).square().sum(),
            exact.square().sum(),
        )
        self.sums[place] += torch.stack([count.double() for count in counts])
        self.amax[place] = torch.maximum(self.amax[place], exact.abs().amax())

    @torch.no_grad()
    def product(self, found: Tensor, exact: Tensor) -> None:
        """Take in a product in FP8 and the same unrounded."""
        exact = exact.detach().float()
        self.sums[-1, CHANGED] += (found.detach().float() - exact).square().sum().double()
        self.sums[-1, WHOLE_SQUARE] += exact.square().sum().double()


def read_gauges(gauges: dict[str, Gauge], tp: Axis, replicas: Axis) -> dict[str, LayerErrors]:
    """The errors of all layers of a stage, over all its ranks. Collective over tp and replicas, and a sync."""
    if not gauges:
        return {}
    sums = torch.stack([gauge.sums for gauge in gauges.values()])
    amax = torch.stack([gauge.amax for gauge in gauges.values()])
    for axis in (tp, replicas):
        all_reduce(sums, axis)
        all_reduce(amax, axis, dist.ReduceOp.MAX)
    rows = zip(gauges, sums.tolist(), amax.tolist(), strict=True)
    return {name: _errors(each, maxima) for name, each, maxima in rows}


def _errors(sums: list[list[float]], maxima: list[float]) -> LayerErrors:
    operands: dict[Role, OperandErrors] = {}
    for role, counts, amax in zip(ROLES, sums, maxima, strict=False):
        if counts[NUMBERS]:
            shares = (counts[UNDERFLOW] / counts[NUMBERS], counts[SATURATED] / counts[NUMBERS])
            operands[role] = OperandErrors(amax, *shares, _ratio(counts))
    return LayerErrors(_ratio(sums[-1]), operands)


def _ratio(sums: list[float]) -> float:
    return (sums[CHANGED] / sums[WHOLE_SQUARE]) ** 0.5 if sums[WHOLE_SQUARE] else 0.0
