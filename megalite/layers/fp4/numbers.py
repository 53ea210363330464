"""FP4 numbers: a matrix as the 4-bit numbers and scales that would stand for it, given as what these are worth.

    e2m1    0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero (OCP Microscaling Formats v1.0, 2023)

    nvfp4   d = e4m3(amax of the block / 6 x 2688 / amax of the tensor) x amax of the tensor / 2688
    mxfp4   d = 2^(floor(log2(amax of the block)) - 2)

A number x of a block becomes d * e2m1(x / d). NVFP4 has blocks of 16, whose scales are e4m3 numbers, and an fp32 scale
for the whole tensor, by which the largest block's scale is 448, the largest e4m3 number (2688 = 6 x 448; NVIDIA,
"Pretraining Large Language Models with NVFP4", 2025, appendix B). MXFP4 has blocks of 32, whose scales are powers of
two (e8m0).

Rounding is to the nearest, ties to the even mantissa, or by chance: up or down to the two neighbours with odds by which
the mean is the number itself. What lies beyond 6 after scaling is clamped: nearly nothing in NVFP4 (a scale rounded
down leaves a block's largest number at 6.4 at most), and up to 8 in MXFP4. There rounding by chance multiplies by 3/4
before and divides after, so that nothing is clamped and the mean is right (Tseng et al., "Training LLMs with MXFP4",
2025, algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers.fp8.quantise import SMALLEST_AMAX, Tile, spread, tile_amax
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import all_reduce

LARGEST = 6.0
"""Of e2m1."""
LARGEST_SCALE = 448.0
"""Of e4m3."""
HEADROOM = 0.75
"""MXFP4, by chance: factor before rounding that leaves nothing to clamp; a block's largest number is below 8."""
SMALLEST_EXPONENT = -126
"""Of a scale: fp32's smallest power of two that is no subnormal."""


@dataclass(frozen=True)
class Fp4Format:
    """Which numbers share a scale, and what scale."""

    block: int
    """Numbers of a row in a block."""
    has_tensor_scale: bool

    def quantise(self, x: Tensor, *, tile: Tile, across: Axis = SINGLE, chance: Tensor | None = None) -> Tensor:
        """Round a matrix `[m, k]`, whole tiles. Collective over `across`, where the whole tensor counts.

        Args:
            tile: rows and columns that share a scale.
            across: ranks that have other parts of the same tensor.
            chance: `[m, k]` from [0, 1), by which to round up or down; None to round to the nearest.

        Returns:
            What the rounded numbers stand for, fp32 `[m, k]`.
        """
        amax = tile_amax(x, tile)
        scale = spread(self._nvfp4(amax, across) if self.has_tensor_scale else _mxfp4(amax), x.shape, tile)
        if chance is not None and not self.has_tensor_scale:
            scale = scale / HEADROOM
        # A scale that is too small for e4m3 is zero, and so is its block
        scaled = x.detach().float() / scale.masked_fill(scale == 0.0, torch.inf)
        return (to_nearest(scaled) if chance is None else by_chance(scaled, chance)) * scale

    def _nvfp4(self, amax: Tensor, across: Axis) -> Tensor:
        """Scales of blocks, as what one of their units is worth."""
        whole = amax.amax()
        if across.size > 1:
            all_reduce(whole, across, dist.ReduceOp.MAX)
        encode = LARGEST * LARGEST_SCALE / whole.clamp(min=SMALLEST_AMAX)
        of_blocks = (amax / LARGEST * encode).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
        return of_blocks / encode


NVFP4 = Fp4Format(block=16, has_tensor_scale=True)
MXFP4 = Fp4Format(block=32, has_tensor_scale=False)
FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


def _mxfp4(amax: Tensor) -> Tensor:
    """2 to the exponent of the block's largest number, less that of e2m1's; undefined where that number is no number,
    so that a fault stays visible."""
    exponent = torch.frexp(amax.clamp(min=SMALLEST_AMAX)).exponent - 3  # of a fraction from [0.5, 1)
    scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(min=SMALLEST_EXPONENT))
    return torch.where(amax.isfinite(), scale, torch.nan)


def to_nearest(x: Tensor) -> Tensor:
    """e2m1, ties to the even mantissa; beyond 6 clamped."""
    x = x.clamp(-LARGEST, LARGEST)
    step = _step(x.abs())
    return (x / step).round() * step


def by_chance(x: Tensor, chance: Tensor) -> Tensor:
    """e2m1, one of the two neighbours: the one further from zero with odds that are the distance from the nearer one.

    Args:
        chance: from [0, 1), like x.
    """
    size = x.abs().clamp(max=LARGEST)
    step = _step(size)
    return torch.copysign((size / step + chance).floor() * step, x)


def _step(size: Tensor) -> Tensor:
    """Between neighbours at a magnitude: 0.5 below 2, 1 below 4, and 2."""
    return 0.5 + 0.5 * (size >= 2.0) + (size >= 4.0)
