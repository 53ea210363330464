"""What stands between the two products of a feed-forward layer, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalite.plugins import Table


@dataclass(frozen=True)
class Activation:
    """An activation, and where its function is: loaded only where something is computed."""

    function: str | Callable[..., Any]
    """`module:name` of a function of what the first product has put out, or the function."""
    is_gated: bool = False
    """The first product is twice as wide, gate before up: `function(gate, up)`."""
    kept: int | None = None
    """Tensors of the layer's width that are kept for its backward pass, the result among them; None for as many as most
    have."""

    @property
    def num_kept(self) -> int:
        """The same with None filled in: what went in, the gate's share, and the result."""
        return self.kept if self.kept is not None else 4 if self.is_gated else 2


ACTIVATIONS = Table(
    "activation",
    {
        "swiglu": Activation("megalite.layers.swiglu:swiglu", is_gated=True),
        "swiglu_clamped": Activation("megalite.layers.mlp:swiglu_clamped", is_gated=True, kept=7),
        "geglu": Activation("megalite.layers.mlp:geglu", is_gated=True),
        "geglu_tanh": Activation("megalite.layers.mlp:geglu_tanh", is_gated=True),
        "reglu": Activation("megalite.layers.mlp:reglu", is_gated=True),
        "gelu": Activation("torch.nn.functional:gelu"),
        "gelu_tanh": Activation("megalite.layers.mlp:gelu_tanh"),
        "silu": Activation("torch.nn.functional:silu"),
        "relu": Activation("torch.nn.functional:relu", kept=1),
        "relu2": Activation("megalite.layers.mlp:relu2"),
    },
)


def is_gated(name: str) -> bool:
    """Whether an activation has a gate beside what it lets through."""
    return ACTIVATIONS[name].is_gated
