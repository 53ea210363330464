"""Normalisations of the stream, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megalite.plugins import Table


@dataclass(frozen=True)
class Norm:
    """A normalisation, and where its module is: loaded only where something is computed."""

    module: str | Callable[..., Any]
    """`module:class` of `Class(size, eps, *, tp, sequence_parallel)`, with parameters `weight` and, perhaps, `bias`; or
    the class."""
    has_bias: bool = False
    init: Literal["ones", "zeros"] = "ones"
    """What its weights start as; `zeros` is for those that 1 is added to."""
    of_heads: str = "rmsnorm"
    """By which norm queries and keys are normalised beside it, where they are."""
    keeps_wide: bool = True
    """Its input is kept in fp32 for the backward pass."""
    multiplies_wide: bool = False
    """What it multiplies with its weights is kept in fp32 too."""


NORMS = Table(
    "norm",
    {
        "rmsnorm": Norm("megalite.layers.norm:RMSNorm"),
        "zero_centered_rmsnorm": Norm(
            "megalite.layers.norm:ZeroCenteredRMSNorm",
            init="zeros",
            of_heads="zero_centered_rmsnorm",
            multiplies_wide=True,
        ),
        "layernorm": Norm("megalite.layers.norm:LayerNorm", has_bias=True, keeps_wide=False),
    },
)
