"""FP4 by the formats' definitions, number by number in Python."""

from __future__ import annotations

import math

import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Its magnitudes: 2 bits of exponent, 1 of mantissa (OCP Microscaling Formats v1.0, table 5)."""
LARGEST_TENSOR_SCALE = 6.0 * 448.0


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of many sizes, with an outlier and a block of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).pow(3)
    x[0, 5], x[1, :32] = 300.0, 0.0
    return x


def nearest(value: float, at: float | None = None) -> float:
    """e2m1 by a walk through the table: ties to the even place. With a chance: the upper neighbour where that is beyond
    what is missing to it."""
    size = min(abs(value), 6.0)
    if at is None:
        best = min(range(8), key=lambda i: (abs(E2M1[i] - size), i % 2))
        return math.copysign(E2M1[best], value)
    below = max(number for number in E2M1 if number <= size)
    above = min((number for number in E2M1 if number > below), default=below)
    share = (size - below) / (above - below) if above > below else 0.0
    return math.copysign(above if at + share >= 1.0 else below, value)


def quantised(x: Tensor, kind: str, chance: Tensor | None = None) -> list[list[float]]:
    """A matrix by loops over rows, blocks and numbers; scales by torch's casts to e4m3 and e8m0."""
    size = {"nvfp4": 16, "mxfp4": 32}[kind]
    whole, found = x.abs().max().item(), []
    for i, row in enumerate(x.tolist()):
        rounded = list[float]()
        for start in range(0, len(row), size):
            block = row[start : start + size]
            largest = max(map(abs, block))
            if kind == "nvfp4":
                of_block = torch.tensor(largest / 6.0 * LARGEST_TENSOR_SCALE / whole).to(torch.float8_e4m3fn).item()
                scale = of_block * whole / LARGEST_TENSOR_SCALE
            else:
                power = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
                scale = torch.tensor(power).to(torch.float8_e8m0fnu).float().item()
                assert scale == power, "an e8m0 number"
            room = 4.0 / 3.0 if kind == "mxfp4" and chance is not None else 1.0
            for j, number in enumerate(block):
                at = None if chance is None else chance[i, start + j].item()
                rounded.append(nearest(number / (scale * room), at) * scale * room if scale else 0.0)
        found.append(rounded)
    return found
