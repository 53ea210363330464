"""A constant factor on a tensor, chosen at construction: nothing at all where the factor is 1."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    """The function that multiplies by a factor."""
    return _keep if factor == 1.0 else lambda x: x * factor


def _keep(x: Tensor) -> Tensor:
    return x
