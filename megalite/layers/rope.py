"""Rotary position embedding, in the half-split form that Llama and GPT-NeoX have in Hugging Face.

Channel i of the first half and channel i of the second half of a head form a pair, rotated by position x frequency_i
(Su et al. 2021). Where neighbours are pairs, as in the paper, they are brought into that order first: the products of
queries and keys, which is all that is made of them, stay the same. Angles are computed in fp32. Legend: t tokens, n
heads, d head_dim, r rotated channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.architecture.settings import RopeConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each `[t, 1, r/2]`, fp32."""


@dataclass(frozen=True)
class Frequencies:
    """Angular frequencies of the channel pairs, and what rotated channels are multiplied with besides."""

    usual: Tensor
    """`[r/2]` fp32."""
    factor: float = 1.0
    long: Tensor | None = None
    """`[r/2]` fp32: those of documents longer than `long_from`; None where all have the same."""
    long_from: int = 0
    """Tokens."""

    def to(self, device: torch.device) -> Frequencies:
        """The same on a device."""
        long = None if self.long is None else self.long.to(device)
        return Frequencies(self.usual.to(device), self.factor, long, self.long_from)


def frequencies(rope: RopeConfig, num_channels: int) -> Frequencies:
    """The frequencies of a model's rotation, stretched as the config says.

    Args:
        num_channels: of a head, `Architecture.turned_dim`.
    """
    rotated = int(num_channels * rope.fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(torch.float32) / rotated
    inv_freq = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return Frequencies(inv_freq)
    if scaling.type == "linear":
        return Frequencies(inv_freq / scaling.factor)
    if scaling.type == "llama3":
        return Frequencies(_llama3(inv_freq, scaling))
    if scaling.type == "yarn":
        return Frequencies(_yarn(inv_freq, scaling, rope.theta), scaling.sharpness)
    usual, long = (inv_freq / torch.tensor(each) for each in (scaling.short_factor, scaling.long_factor))
    return Frequencies(usual, scaling.sharpness, long, scaling.original_max_positions)


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """High frequencies stay, low ones are divided by `factor`, those between are interpolated by how many of their
    wavelengths fit into the original length: Llama 3.1."""
    waves_in_context = scaling.original_max_positions * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((waves_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / scaling.factor


def _yarn(inv_freq: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """The same with a ramp over channels, between those that turn `beta_fast` and `beta_slow` times within the original
    length (Peng et al. 2023, section 3.2)."""
    pairs = inv_freq.shape[0]

    def channel_of(turns: float) -> float:
        return pairs * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    span = high - low if high != low else 0.001  # as everybody does, lest a division by zero follows
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return inv_freq / scaling.factor * stretched + inv_freq * (1.0 - stretched)


def rotation(positions: Tensor, by: Frequencies, reach: Tensor | None = None) -> Rotation:
    """cos and sin of every token's angles, times the factor of the frequencies.

    Args:
        positions: `[t]` integer positions inside each document.
        reach: `[t]` how far the positions of each token's document go, where long documents have frequencies of their
            own.
    """
    inv_freq = by.usual
    if by.long is not None:
        assert reach is not None
        inv_freq = torch.where((reach > by.long_from).unsqueeze(1), by.long, by.usual)
    angles = (positions.to(inv_freq.dtype).unsqueeze(1) * inv_freq).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if by.factor == 1.0 else (cos * by.factor, sin * by.factor)


def rotate(x: Tensor, by: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate the first r channels of each head: `[t, n, d]` -> `[t, n, d]`, computed in fp32.

    Args:
        interleaved: neighbours are pairs; they come out as halves.
    """
    cos, sin = by
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, cos.dtype)
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    (first, second), rest = (x[..., each].to(wide) for each in pairs), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
