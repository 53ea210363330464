"""Normalisation, computed in fp32 whatever the stream's format.

The weights are whole on every tensor-parallel rank; see `collectives.replicated` for their gradients under sequence
parallelism. Shapes: `[t, h]` -> `[t, h]`, t the local tokens of the stream; a head norm takes `[t, heads, head_dim]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.architecture.norms import NORMS
from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import copy_to, gather_rows, replicated, sum_over


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, *, tp: Axis = SINGLE, sequence_parallel: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.tp = tp
        self.share = replicated(sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.share(self.weight, self.tp), self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """`x / rms(x) * (1 + weight)`, multiplied in fp32: Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        return zero_centered_rms_norm(x, self.share(self.weight, self.tp), self.eps)


class HeadNorm(nn.Module):
    """RMSNorm over each head's channels, heads cut over tp: the gradient of its weight is always a partial sum.

    Args:
        kind: `rmsnorm` or `zero_centered_rmsnorm`.
    """

    def __init__(self, head_dim: int, eps: float, *, kind: str = "rmsnorm", tp: Axis = SINGLE):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.eps = eps
        self.tp = tp
        self.normalise = RMS_NORMS[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, copy_to(self.weight, self.tp), self.eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads together, which are cut over tp, as is its weight (OLMo 2).

    Shape: `[t, n, d]` -> `[t, n, d]`, n the heads of this rank.

    Args:
        num_heads: of this rank.
        sharers: the ranks that have the same heads: each holds a part of their weight. What all of them have counts
            in the mean as often as they are.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        kind: str = "rmsnorm",
        tp: Axis = SINGLE,
        sharers: Axis = SINGLE,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim // sharers.size))
        self.eps = eps
        self.tp, self.sharers = tp, sharers
        self.is_zero_centered = NORMS[kind].init == "zeros"

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over(wide.square().sum(-1, keepdim=True), self.tp) / (wide.shape[1] * self.tp.size)
        normalised = wide * torch.rsqrt(squares + self.eps)
        weight = gather_rows(self.weight, self.sharers)
        if self.is_zero_centered:
            weight = 1.0 + weight.to(wide.dtype)
        return (weight * normalised).to(x.dtype).view_as(x)


class LayerNorm(nn.Module):
    """`(x - mean(x)) / std(x) * weight + bias` (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float, *, tp: Axis = SINGLE, sequence_parallel: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.tp = tp
        self.share = replicated(sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.share(self.weight, self.tp), self.share(self.bias, self.tp)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim; at least fp32 inside, result in the format of `x`."""
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)  # the same operations, by one call
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def zero_centered_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, times 1 + weight; all of it at least fp32, result in the format of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised * (1.0 + weight.to(wide.dtype))).to(x.dtype)


RMS_NORMS = {"rmsnorm": rms_norm, "zero_centered_rmsnorm": zero_centered_rms_norm}

NORM_OF_HEADS: dict[str, type[RMSNorm]] = {"rmsnorm": RMSNorm, "zero_centered_rmsnorm": ZeroCenteredRMSNorm}
"""The same as modules."""
