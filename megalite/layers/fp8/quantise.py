"""FP8 numbers: a matrix as 8-bit data and the scales of its tiles.

    x [m, k]  ->  data [m, k] in FP8,  inverse [m/r, k/c] in fp32;   x ~ data * inverse, tile by tile

A tile of r x c numbers shares a scale, chosen so that its largest number becomes the format's largest. None stands for
the whole length: (None, None) is one scale a tensor, (1, None) one a row, (128, 128) one a block.

e4m3 has 3 bits of mantissa and ends at 448; e5m2 has 2, ends at 57344 and reaches further down (Micikevicius et al.
2022). What lies beyond is clamped, as the hardware's saturating casts do; torch before 2.10 made it NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Tile = tuple[int | None, int | None]

WHOLE: Tile = (None, None)

SMALLEST_AMAX = 1e-30
"""Tiles of zeros are scaled as if this were their largest number, which leaves them zero and the scale finite."""


class Quantised(NamedTuple):
    """A matrix `[m, k]` that is reduced over k."""

    data: Tensor
    """FP8, `[m, k]`."""
    inverse: Tensor
    """fp32 `[m/r, k/c]`, rounded up: what a number of the tile is multiplied by."""
    tile: Tile

    def t(self) -> Quantised:
        """The transposed matrix, nothing rounded anew."""
        return Quantised(self.data.t(), self.inverse.t(), (self.tile[1], self.tile[0]))

    def dequantise(self) -> Tensor:
        """The numbers that are multiplied, fp32 `[m, k]`."""
        return self.data.float() * spread(self.inverse, self.data.shape, self.tile)


def largest(fp8: torch.dtype) -> float:
    """The largest number of a format."""
    return torch.finfo(fp8).max


def tile_amax(x: Tensor, tile: Tile) -> Tensor:
    """The largest magnitude of each tile of `x [m, k]`, fp32 `[m/r, k/c]`, rounded up; the rest counts as zeros."""
    rows, columns = (tile[0] or x.shape[0], tile[1] or x.shape[1])
    pad = (-x.shape[1] % columns, -x.shape[0] % rows)
    magnitudes = x.detach().abs()
    if any(pad):
        magnitudes = torch.nn.functional.pad(magnitudes, (0, pad[0], 0, pad[1]))
    tiles = magnitudes.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return tiles.amax(dim=(1, 3)).float()


def scale_of(amax: Tensor, fp8: torch.dtype, *, power_of_two: bool) -> Tensor:
    """What makes `amax` the format's largest number; rounded down to a power of two, never up, so nothing overflows.

    An infinite or undefined amax gives a scale that makes the whole tile undefined: a fault stays visible.
    """
    scale = largest(fp8) / amax.clamp(min=SMALLEST_AMAX)
    if not power_of_two:
        return scale
    exponent = torch.frexp(scale).exponent - 1
    return torch.where(scale > 0, torch.ldexp(torch.ones_like(scale), exponent), scale)


def cast(x: Tensor, scale: Tensor, tile: Tile, fp8: torch.dtype) -> Quantised:
    """Multiply tiles by their scales, clamp and round to nearest, ties to even."""
    limit = largest(fp8)
    scaled = x.detach().float() * spread(scale, x.shape, tile)
    return Quantised(scaled.clamp(-limit, limit).to(fp8), scale.reciprocal(), tile)


class Passes(NamedTuple):
    """The two passes over a matrix that rounding takes."""

    amax: Callable[[Tensor, Tile], Tensor] = tile_amax
    cast: Callable[[Tensor, Tensor, Tile, torch.dtype], Quantised] = cast


ONE_BY_ONE = Passes()
"""Op by op, each a pass of its own: a GPU is four times as slow with them."""


VARIANTS = 64
"""Tiles, formats and orders of strides that each pass may be compiled for; torch gives up after 8 of all of them."""


@functools.cache
def compiled_passes() -> Passes:
    """Each as one kernel, which a GPU needs, and a cast that leaves rows in one piece. The numbers are the same. Lets
    the compiler make `VARIANTS` of a function, for the whole process."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)

    def amax(x: Tensor, tile: Tile) -> Tensor:
        return _compiled_amax(tile)(x)

    def cast_to_rows(x: Tensor, scale: Tensor, tile: Tile, fp8: torch.dtype) -> Quantised:
        return Quantised(_compiled_cast(tile, fp8)(x, scale), scale.reciprocal(), tile)

    return Passes(amax, cast_to_rows)


@functools.cache
def _compiled_amax(tile: Tile) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: tile_amax(x, tile), dynamic=True)


@functools.cache
def _compiled_cast(tile: Tile, fp8: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda x, scale: cast(x, scale, tile, fp8).data.contiguous(), dynamic=True)


def spread(per_tile: Tensor, shape: torch.Size, tile: Tile) -> Tensor:
    """One number a tile `[m/r, k/c]` -> something that broadcasts with `[m, k]`."""
    for dim, size in enumerate(tile):
        if size is not None and size > 1:
            assert per_tile.shape[dim] == math.ceil(shape[dim] / size)
            per_tile = per_tile.repeat_interleave(size, dim=dim).narrow(dim, 0, shape[dim])
    return per_tile
