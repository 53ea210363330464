"""Recipes: which numbers share a scale, where the scale comes from, and which of the two formats each tensor takes.

    recipe   activations   weights     gradients   scale                       formats
    current  tensor        tensor      tensor      this tensor's maximum       hybrid, e4m3
    delayed  tensor        tensor      tensor      maxima of former steps      hybrid, e4m3
    rowwise  row           row         row         its own, a power of two     e4m3
    block    1 x 128       128 x 128   1 x 128     its own, a power of two     e4m3
    mxfp8    1 x 32        1 x 32      1 x 32      its own, a power of two     e4m3

Rows and blocks lie along the dim that a product reduces over, so a matrix that goes into two products (an activation
into y = x w^T and into dw = dy^T x) is rounded twice, each time from the unrounded numbers. `hybrid` is e4m3 forward
and e5m2 for gradients. Sources: current, delayed and mxfp8 as Transformer Engine has them; rowwise as torchao; block as
DeepSeek-V3 (2024, section 3.3) with Transformer Engine's powers of two; the scales of mxfp8 are the OCP
specification's e8m0, rounded as Transformer Engine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megalite.config.schema import Fp8Config
from megalite.layers.fp8.quantise import E4M3, E5M2, WHOLE, Tile

Role = Literal["activation", "weight", "gradient"]

ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")

TILES: dict[str, dict[Role, Tile]] = {
    "current": dict.fromkeys(ROLES, WHOLE),
    "delayed": dict.fromkeys(ROLES, WHOLE),
    "rowwise": dict.fromkeys(ROLES, (1, None)),
    "block": {"activation": (1, 128), "weight": (128, 128), "gradient": (1, 128)},
    "mxfp8": dict.fromkeys(ROLES, (1, 32)),
}
"""Of a matrix `[m, k]` that is reduced over k."""


@dataclass(frozen=True)
class Recipe:
    """How each kind of tensor becomes FP8."""

    tiles: dict[Role, Tile]
    formats: dict[Role, torch.dtype]
    power_of_two: bool

    def is_symmetric(self, role: Role) -> bool:
        """Whether the transposed matrix has the same tiles, so that one rounding serves both products."""
        rows, columns = self.tiles[role]
        return rows == columns


def make_recipe(config: Fp8Config) -> Recipe:
    """The recipe of a validated config; nvfp4 is Transformer Engine's alone."""
    gradient = E5M2 if config.number_format == "hybrid" else E4M3
    return Recipe(
        tiles=TILES[config.recipe],
        formats={"activation": E4M3, "weight": E4M3, "gradient": gradient},
        power_of_two=config.recipe in ("rowwise", "block", "mxfp8"),
    )
