"""Low-rank adapters beside linear layers (LoRA, Hu et al. 2021): what a frozen weight puts out, and a correction.

    y = x W' + scale (x A') B'        A [rank, in], B [out, rank]

Adapters add no message to the forward pass. Beside a column-parallel layer A is whole on every rank and B is cut as the
outputs are; beside a row-parallel one A is cut as the inputs are and B is whole, and what ranks put out is added up
with the layer's own. Either way the whole one's gradient is a partial sum on each rank, which `copy_to` adds up.

Where a layer is made of several (queries, keys and values), their A's are one product, and each has a B of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.axes import Axis
from megalite.parallel.collectives import copy_to


class AdaptedPart(NamedTuple):
    """Some outputs of a linear layer that lie together."""

    size: int
    """How many, on this rank."""
    is_adapted: bool


class LowRank(nn.Module):
    """The adapters of one linear layer.

    Args:
        in_features: of the layer, on this rank.
        parts: the layer's outputs on this rank, in order.
        rank: of each adapter.
        scale: factor on what they put out.
        tp: the tensor-parallel axis.
        cuts_inputs: the layer is row-parallel.

    Shape: `x [t, in]` and `y [t, out]` -> `[t, out]`.
    """

    def __init__(
        self, in_features: int, parts: Sequence[AdaptedPart], *, rank: int, scale: float, tp: Axis, cuts_inputs: bool
    ):
        super().__init__()
        sizes = [part.size for part in parts if part.is_adapted]
        self.a = nn.Parameter(torch.empty(rank * len(sizes), in_features))
        self.b = nn.Parameter(torch.empty(sum(sizes), rank))
        self.is_on = True
        """Without it a layer puts out what its weight does."""
        self.parts, self.rank, self.scale, self.tp, self.cuts_inputs = tuple(parts), rank, scale, tp, cuts_inputs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """What the layer puts out for `x`, given what its weight does."""
        if not self.is_on:
            return y
        a = self.a if self.cuts_inputs else copy_to(self.a, self.tp)
        b = copy_to(self.b, self.tp) if self.cuts_inputs else self.b
        narrow = F.linear(x, a) * self.scale
        sizes, is_adapted = (tuple(each) for each in zip(*self.parts, strict=True))
        correct = _corrected if torch.compiler.is_compiling() else _Corrected.apply
        return correct(y, narrow, b, sizes, is_adapted)


def _corrected(y: Tensor, narrow: Tensor, b: Tensor, sizes: tuple[int, ...], is_adapted: tuple[bool, ...]) -> Tensor:
    """The same for the compiler, which makes one pass of the sums, and keeps no graph with autograd's functions."""
    matrices = b.split([size for size, adapted in zip(sizes, is_adapted, strict=True) if adapted])
    pairs = zip(narrow.split(b.shape[1], dim=1), matrices, strict=True)
    parts = zip(y.split(sizes, dim=1), is_adapted, strict=True)
    return torch.cat([part + F.linear(*next(pairs)) if adapted else part for part, adapted in parts], dim=1)


class _Corrected(torch.autograd.Function):
    """`y + narrow B'` part by part, each added as it is multiplied; a gradient goes on to `y` as it has come."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, narrow: Tensor, b: Tensor, sizes: tuple[int, ...], is_adapted: tuple[bool, ...]
    ) -> Tensor:
        ctx.save_for_backward(narrow, b)
        ctx.sizes, ctx.is_adapted = sizes, is_adapted
        corrected = y.clone()
        for part, each, matrix in _adapted_parts(corrected, narrow, b, sizes, is_adapted):
            part.addmm_(each, matrix.t())
        return corrected

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_y,) = gradients
        narrow, b = ctx.saved_tensors
        parts = list(_adapted_parts(of_y, narrow, b, ctx.sizes, ctx.is_adapted))
        of_narrow = torch.cat([part @ matrix for part, _, matrix in parts], dim=1)
        of_b = torch.cat([part.t() @ each for part, each, _ in parts])
        return of_y, of_narrow, of_b, None, None


def _adapted_parts(
    whole: Tensor, narrow: Tensor, b: Tensor, sizes: tuple[int, ...], is_adapted: tuple[bool, ...]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each part that has an adapter its columns of the whole, what leads to it, `[t, rank]`, and its B."""
    parts = [part for part, adapted in zip(whole.split(sizes, dim=1), is_adapted, strict=True) if adapted]
    yield from zip(parts, narrow.split(b.shape[1], dim=1), b.split([part.shape[1] for part in parts]), strict=True)
