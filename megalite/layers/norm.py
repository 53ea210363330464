"""Normalisation, computed in fp32 whatever the stream's format.

The weights are whole on every tensor-parallel rank; see `collectives.replicated` for their gradients under sequence
parallelism. Shapes: `[t, h]` -> `[t, h]`, t the local tokens of the stream; a head norm takes `[t, heads, head_dim]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.axes import SINGLE, Axis
from megalite.parallel.collectives import copy_to, replicated


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


class HeadNorm(nn.Module):
    """RMSNorm over each head's channels, heads cut over tp: the gradient of its weight is always a partial sum."""

    def __init__(self, head_dim: int, eps: float, *, tp: Axis = SINGLE):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.eps = eps
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, copy_to(self.weight, self.tp), self.eps)


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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)
