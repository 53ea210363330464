"""Normalisations of the stream, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """A normalisation, and where its module is: loaded only where something is computed."""

    module: str
    """`module:class` of `Class(size, eps, *, tp, sequence_parallel)`, with parameters `weight` and, perhaps, `bias`."""
    has_bias: bool = False
    init: Literal["ones", "zeros"] = "ones"
    """What its weights start as."""
    keeps_wide: bool = True
    """Its input is kept in fp32 for the backward pass."""
    multiplies_wide: bool = False
    """What it multiplies with its weights is kept in fp32 too."""


NORMS: dict[str, Norm] = {
    "rmsnorm": Norm("megalite.layers.norm:RMSNorm"),
    "zero_centered_rmsnorm": Norm("megalite.layers.norm:ZeroCenteredRMSNorm", init="zeros", multiplies_wide=True),
    "layernorm": Norm("megalite.layers.norm:LayerNorm", has_bias=True, keeps_wide=False),
}
"""Plug-ins may add to it."""
