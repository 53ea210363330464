"""The precision of a stage's linear layers, and what that needs around a step.

A stage attaches its blocks once, when it is built; layers are then given their way to multiply, and no forward pass
asks for a format. Head, embedding, norms and anything that is not a linear layer of a block are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn

from megalite.layers.documents import Documents
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear

ReadState = Callable[[str], Tensor | None]
"""Name of a state tensor -> the tensor as it was saved, fp32 on the CPU, or None."""


class Precision(Protocol):
    """How the linear layers of a stage multiply. Every method is called by all ranks of the stage."""

    def attach(self, blocks: nn.ModuleDict) -> None:
        """Give the linear layers of blocks, keyed by their index, their way to multiply."""
        ...

    def context(self, documents: Documents) -> AbstractContextManager:
        """Around each forward pass of the stage, and around each that is done again for the backward pass.

        Args:
            documents: of the stream that passes.
        """
        ...

    def end_step(self) -> None:
        """All gradients of a step are there and the weights are about to change. Collective over tp and dp."""
        ...

    def forget_weights(self) -> None:
        """The weights have changed by other means than a step."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs to go on exactly: fp32 tensors, equal on all tp and dp ranks of the stage, by names
        that no layout changes."""
        ...

    def load(self, read: ReadState) -> list[str]:
        """Take up saved state, in place of what there is.

        Returns:
            Names of what was not there, and starts anew.
        """
        ...


class OneFormat:
    """Weights, activations and products all have the stage's own format."""

    def attach(self, blocks: nn.ModuleDict) -> None:
        pass

    def context(self, documents: Documents) -> AbstractContextManager:
        return nullcontext()

    def end_step(self) -> None:
        pass

    def forget_weights(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, read: ReadState) -> list[str]:
        return []


ONE_FORMAT = OneFormat()


def linear_layers(
    layers: nn.Module, prefix: str = "blocks"
) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    """Every linear layer of the blocks that is cut over ranks, with its name in the model: `blocks.3.mlp.down`."""
    for name, module in layers.named_modules(prefix=prefix):
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            yield name, module
