"""An activation with a gate: the gate is squared where it is positive."""

from torch import Tensor

from megalite import extend


@extend.activation("squared_gate", is_gated=True)
def squared_gate(gate: Tensor, up: Tensor) -> Tensor:
    return gate.relu().square() * up
