"""Products of rows in groups (`layers.grouped`) in FP8: what experts make of their tokens.

    y  = x w[e]^T      x as activation, by rows         w[e] as weight
    dx = dy w[e]       dy as gradient, by rows          w[e]^T as weight
    dw                 in the stage's own format

Scales are of rows or of pieces of rows, so that a token is rounded alike whatever rank its expert is on and whatever
other tokens go there: recipes with one scale a tensor are none for experts. The same is why dw is not in FP8: its
scales would be of tokens that one expert happens to get on one rank, and training would differ from ep to ep.

Nothing is kept: weights are rounded for each use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.layers.fp8.linear import CurrentScales
from megalite.layers.fp8.products import Product
from megalite.layers.fp8.quantise import Quantised
from megalite.layers.fp8.recipes import Recipe, Role
from megalite.layers.grouped import RowsRole, ends, groups

AllGroups = Callable[[Quantised, Quantised, Tensor, torch.dtype], Tensor]
"""Rows `[n, k]`, matrices `[g * m, k]`, where each group ends, and the format of what comes out, `[n, m]`."""


class Fp8Rows:
    """See `layers.grouped.Rows`.

    Args:
        recipe: tiles and formats.
        scales: where scales come from.
        multiply: of one group.
        at_once: of all groups, where there is a kernel.
    """

    def __init__(self, recipe: Recipe, scales: CurrentScales, multiply: Product, at_once: AllGroups | None = None):
        self.recipe, self._scales, self._multiply, self._at_once = recipe, scales, multiply, at_once

    def multiply(self, role: RowsRole, rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
        if not rows.shape[0]:
            return rows.new_empty(0, matrices.shape[1])
        is_back = role == "gradient"
        left = self.quantise(role, rows)
        if self._at_once is not None:
            right = self.quantise("weight", matrices.flatten(0, 1), transposed=is_back)
            return self._at_once(left, right, ends(sizes), rows.dtype)
        rounded = self.round_matrices(matrices, transposed=is_back)
        y = rows.new_empty(rows.shape[0], matrices.shape[1])
        for index, pieces in groups(sizes):
            for piece in pieces:
                part = Quantised(left.data[piece], left.inverse[piece], left.tile)
                y[piece] = self._multiply(part, rounded[index], rows.dtype, is_forward=not is_back)
        return y

    def quantise(self, role: Role, x: Tensor, *, transposed: bool = False) -> Quantised:
        """Round a matrix `[m, k]` that is to be reduced over k."""
        scale = self._scales(role, x, transposed=transposed)
        return self._scales.passes.cast(x, scale, self.recipe.tiles[role], self.recipe.formats[role])

    def round_matrices(self, matrices: Tensor, *, transposed: bool) -> list[Quantised]:
        """Each of `[g, m, k]`, as if it were alone."""
        tile = self.recipe.tiles["weight"]
        if tile[0] != 1:
            return [self.quantise("weight", each, transposed=transposed) for each in matrices]
        flat = self.quantise("weight", matrices.flatten(0, 1), transposed=transposed)  # ranks are asked once for all
        parts = (each.unflatten(0, matrices.shape[:2]) for each in (flat.data, flat.inverse))
        return [Quantised(data, inverse, tile) for data, inverse in zip(*parts, strict=True)]

    def forget_weights(self) -> None:
        """There are none."""


def scaled_grouped_mm(left: Quantised, right: Quantised, stops: Tensor, out: torch.dtype) -> Tensor:
    """By `torch._scaled_grouped_mm`: one scale a row, on GPUs from Hopper on."""
    matrices = right.data.unflatten(0, (stops.shape[0], -1))
    return torch._scaled_grouped_mm(
        left.data.contiguous(),
        matrices.contiguous().transpose(1, 2),
        left.inverse.flatten(),
        right.inverse.view(stops.shape[0], -1),
        offs=stops,
        out_dtype=out,
        use_fast_accum=False,
    )
