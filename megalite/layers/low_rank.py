"""Low-rank adapters beside linear layers (LoRA, Hu et al. 2021): what a frozen weight puts out, and a correction.

    y = x W' + scale (x A') B'        A [rank, in], B [out, rank]

Adapters add no message to the forward pass. Beside a column-parallel layer A is whole on every rank and B is cut as the
outputs are; beside a row-parallel one A is cut as the inputs are and B is whole, and what ranks put out is added up
with the layer's own. Either way the whole one's gradient is a partial sum on each rank, which `copy_to` adds up.

Where a layer is made of several (queries, keys and values), their A's are one product, and each has a B of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
        narrow = (F.linear(x, a) * self.scale).split(self.rank, dim=1)
        matrices = b.split([part.size for part in self.parts if part.is_adapted])
        added = iter([F.linear(each, matrix) for each, matrix in zip(narrow, matrices, strict=True)])
        if all(part.is_adapted for part in self.parts):
            return y + torch.cat(list(added), dim=1)
        outputs = y.split([part.size for part in self.parts], dim=1)
        whole = [
            of_part + next(added) if part.is_adapted else of_part
            for part, of_part in zip(self.parts, outputs, strict=True)
        ]
        return torch.cat(whole, dim=1)
