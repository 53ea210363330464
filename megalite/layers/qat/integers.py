"""Weights as integers and scales, and the weights that these stand for.

    w [out, in]  ->  q [out, in] integers,  scale [out, in/g],  zero [out, in/g];   w ~ (q - zero) * scale

g numbers along the input dim share a scale. With b bits and n = 2^(b-1) - 1, after Jacob et al. (2018):

    symmetric    scale = max |w| / n                            zero = 0               q from -n to n
    else         scale = (max(w, 0) - min(w, 0)) / (2^b - 1)    zero = -min(w, 0) / scale, rounded
                                                                                       q from 0 to 2^b - 1

Nothing is clipped but what rounding a scale moves beyond the last integer, so a gradient passes through all numbers
alike. Scales have the weight's own format: a model that is written down has the very scales that it was trained with.
Scales that are trained (`layers.qat.learned`) are symmetric ones, and what lies beyond -n and n is clipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.architecture.settings import largest_integer
from megalite.config.schema import QatConfig
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import all_reduce

TINY = torch.finfo(torch.float32).tiny
"""The least scale there is."""


class Integers(NamedTuple):
    """A matrix `[..., out, in]` in groups along its last dim."""

    q: Tensor
    """Whole numbers, `[..., out, groups, g]`, in the scale's format."""
    scale: Tensor
    """`[..., out, groups, 1]`."""
    zero: Tensor | None
    """Like the scale, whole numbers; None for zeros."""

    def values(self) -> Tensor:
        """What they stand for, `[..., out, in]`."""
        q = self.q if self.zero is None else self.q - self.zero
        return (q * self.scale).flatten(-2)


def to_integers(weight: Tensor, qat: QatConfig, across: Axis = SINGLE, scale: Tensor | None = None) -> Integers:
    """Round a matrix `[..., out, in]`. Collective over `across`, where that has ranks.

    Args:
        across: ranks that have other parts of the same rows, where a row has one scale.
        scale: `[..., out, in/g]`, trained; None takes what the weight says.
    """
    if scale is not None:
        ratio, size = in_scales(weight, scale)
        limit = largest_integer(qat.bits)
        return Integers(ratio.round_().clamp_(-limit, limit).to(weight.dtype), size.to(weight.dtype), None)
    assert qat.group_size is None or across.size == 1, "groups do not lie on two ranks"
    grouped = weight.detach().unflatten(-1, (-1, qat.group_size or weight.shape[-1])).float()
    if qat.symmetric:
        largest, span = largest_integer(qat.bits), _maximum(grouped.abs(), across)
        scale = _scale(span / largest, weight.dtype)
        q = (grouped / scale).round_().clamp_(-largest, largest)
        return Integers(q.to(weight.dtype), scale.to(weight.dtype), None)
    largest = 2**qat.bits - 1
    top, bottom = _maximum(torch.stack((grouped, -grouped)), across).clamp(min=0.0)
    scale = _scale((top + bottom) / largest, weight.dtype)
    zero = (bottom / scale).round_().clamp_(max=largest)
    q = (grouped / scale).round_().add_(zero).clamp_(0, largest)
    return Integers(q.to(weight.dtype), scale.to(weight.dtype), zero.to(weight.dtype))


def in_scales(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[..., out, in]` in units of scales `[..., out, in/g]` that are trained: fp32 `[..., out, groups, g]`,
    and the units, fp32 `[..., out, groups, 1]`. A scale below 0 counts by its size."""
    size = scale.detach().float().abs().clamp_(min=TINY).unsqueeze(-1)
    return weight.detach().float().unflatten(-1, (scale.shape[-1], -1)) / size, size


def _maximum(grouped: Tensor, across: Axis) -> Tensor:
    found = grouped.amax(dim=-1, keepdim=True)
    if across.size > 1:
        all_reduce(found, across, dist.ReduceOp.MAX)
    return found


def _scale(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 numbers that the format has; 1 for a group of zeros."""
    scale = exact.to(dtype).float()
    return scale.masked_fill_(scale == 0.0, 1.0)
