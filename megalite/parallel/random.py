"""Random numbers that do not depend on the layout.

Dropout needs a mask. Drawn from a generator, it would change with tp, with the micro-batch and with recomputation, and
every generator's state would have to be saved. Here the mask is a pure function instead: each token carries a key (its
place in the whole training run), and the mask of channel c is a hash of (seed, site, key, c). So every layout drops the
same channels of the same tokens, recomputation finds the mask again, and a resumed run needs no state.

The hash is the finaliser of splitmix64 (Steele et al. 2014); the trade-off is a dozen integer operations an element,
which a compiler fuses.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed 64-bit number
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB as a signed 64-bit number
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_INVERSE_OF_GOLDEN = pow(_GOLDEN, -1, 1 << 64) - (1 << 64)


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed for something that has a name, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def dropout(x: Tensor, keys: Tensor, *, rate: float, seed: int | Tensor, first_channel: int = 0) -> Tensor:
    """Drop elements of a stream with probability `rate` and scale the rest by 1 / (1 - rate).

    Args:
        x: `[tokens, channels]`.
        keys: `[tokens]` int64, unique a token and training step.
        rate: probability of dropping, in [0, 1).
        seed: of this site of the model, from `name_seed`; a tensor is `[]` int64, on the CPU or beside x.
        first_channel: whole-model index of the first channel, for a tensor cut over its channels.
    """
    channels = torch.arange(first_channel, first_channel + x.shape[1], device=x.device)
    return x * (uniform(keys, channels, seed) >= rate) / (1.0 - rate)


def uniform(keys: Tensor, channels: Tensor, seed: int | Tensor) -> Tensor:
    """Numbers from [0, 1), multiples of 2^-24: a function of (seed, key, channel) alone.

    Args:
        keys: `[tokens]` int64.
        channels: `[channels]` int64.
        seed: from `name_seed`; a tensor is `[]` int64, on the CPU or beside the keys.

    Returns:
        `[tokens, channels]`, fp32.
    """
    # mix(key) + channel * golden. torch.compile would write that product as C++, whose compiler takes an overflow for
    # what cannot be: it left out the end of a loop, and the kernel ran on into nothing. This sum has no known range.
    bits = _mix(((_mix(keys + seed) * _INVERSE_OF_GOLDEN).unsqueeze(1) + channels) * _GOLDEN)
    return _shift(bits, 40).to(torch.float32) * 2.0**-24


def kept_pairs(first: Tensor, second: Tensor, seeds: Tensor, rate: float) -> Tensor:
    """Which pairs are not dropped with probability `rate`: a function of (seed, first key, second key) alone.

    Args:
        first: `[r]` int64.
        second: `[c]` int64.
        seeds: `[n]` int64, each of which drops others.

    Returns:
        `[n, r, c]` bool.
    """
    rows = _mix(first + seeds.unsqueeze(1))
    return _shift(_mix(rows.unsqueeze(2) + second), 40) >= math.ceil(rate * 2**24)


def normal(keys: Tensor, seed: int) -> Tensor:
    """Standard normal numbers, fp32: a function of (seed, key) alone, by the Box-Muller transform.

    Args:
        keys: int64, of any shape.
        seed: from `name_seed`.
    """
    bits = _mix(_mix(keys + seed))
    radius = ((_shift(bits, 40) + 1).to(torch.float32) * 2.0**-24).log_().mul_(-2.0).sqrt_()
    angle = _shift(bits << 24, 40).to(torch.float32) * (2.0 * math.pi * 2.0**-24)
    return radius * angle.cos_()


def random_bits(keys: Tensor, seed: int | Tensor, num_bits: int) -> Tensor:
    """Random integers below 2^num_bits, int64: a function of (seed, key) alone.

    Args:
        keys: int64, of any shape.
        seed: from `name_seed`; a tensor is `[]` int64, on the CPU or beside the keys.
        num_bits: at most 63.
    """
    return _shift(_mix(keys + seed), 64 - num_bits)


def _mix(z: Tensor) -> Tensor:
    z = z * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit numbers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
