"""Rotary position embedding, in the half-split form that Llama and GPT-NeoX have in Hugging Face.

Channel i of the first half and channel i of the second half of a head form a pair, rotated by position x frequency_i
(Su et al. 2021). Angles are computed in fp32. Legend: t tokens, n heads, d head_dim, r rotated channels of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config.schema import RopeConfig

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each `[t, 1, r/2]`, fp32."""


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angular frequency of each channel pair, `[r/2]` fp32, scaled as the config says.

    The llama3 form is that of Llama 3.1: high frequencies stay, low ones are divided by `factor`, those between are
    interpolated by how many of their wavelengths fit into the original length.
    """
    rotated = int(head_dim * rope.fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(torch.float32) / rotated
    inv_freq = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return inv_freq
    if scaling.type == "linear":
        return inv_freq / scaling.factor
    waves_in_context = scaling.original_max_positions * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((waves_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / scaling.factor


def rotation(positions: Tensor, inv_freq: Tensor) -> Rotation:
    """cos and sin of every token's angles.

    Args:
        positions: `[t]` integer positions inside each document.
        inv_freq: `[r/2]` from `frequencies`.
    """
    angles = (positions.to(inv_freq.dtype).unsqueeze(1) * inv_freq).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate the first r channels of each head: `[t, n, d]` -> `[t, n, d]`, computed in fp32."""
    cos, sin = by
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, cos.dtype)
    first, second, rest = x[..., :half].to(wide), x[..., half : 2 * half].to(wide), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
