"""The first precision seam: how a linear layer multiplies.

A `Gemm` maps `x [tokens, in]` and `weight [out, in]` to `[tokens, out]`. Parameters and communication stay with the
layer that calls it, so every backend has the same parameter names, the same cuts and the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Gemm = Callable[[Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """The product in the tensors' own format."""
    return F.linear(x, weight)
