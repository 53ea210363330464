"""Random Hadamard transform: an outlier's size is spread over the numbers beside it before they are rounded.

    x [m, k]  ->  x (S H) in pieces of g numbers of a row;   H [g, g] Hadamard / sqrt(g),  S = diag(+1 or -1)

S H is orthogonal, so a product of two matrices that are both transformed along the dim that it reduces over is what it
was: (x S H)(w S H)^T = x w^T. Signs keep numbers of a pattern from adding up into one. They are drawn once a run and
shared by all layers, as published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.parallel.random import name_seed, random_bits


class Hadamard:
    """The transform of a run.

    Args:
        size: g, a power of two.
        seed: the run's.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        signs = random_bits(torch.arange(size), name_seed(seed, "fp4/hadamard"), 1).float() * 2.0 - 1.0
        self.matrix = signs.unsqueeze(1) * sylvester(size) / size**0.5
        """`[g, g]`, fp32."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x [m, k]` with k a multiple of g -> the same shape, fp32."""
        self.matrix = self.matrix.to(x.device)
        return (x.float().unflatten(1, (-1, self.size)) @ self.matrix).flatten(1)


def sylvester(size: int) -> Tensor:
    """Hadamard's matrix of 1 and -1, `[size, size]`, symmetric."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
