"""What of a model a step trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megalite.architecture.architecture import Architecture


class BlockGradients(NamedTuple):
    """Of which weights of a block gradients are made: what they are made of is kept for them."""

    norms: bool = True
    entering: bool = True
    """Of attention's products, the last one apart."""
    leaving: bool = True
    """Of that one."""
    expanding: bool = True
    """Of an MLP's products that widen."""
    contracting: bool = True
    """Of the one that leads down."""


ALL_GRADIENTS = BlockGradients()


@dataclass(frozen=True)
class TrainedParts:
    """Of a model, in which weights may be frozen."""

    first: int
    """The first block that a gradient goes back to: neither those before it nor the embedding are trained."""
    shares: tuple[float, ...]
    """Of the matrices of each block, those that predict further ahead behind the others, what is trained."""
    trains_head: bool

    def is_passed(self, index: int) -> bool:
        """Whether a backward pass goes through a block."""
        return index >= self.first


def everything(model: Architecture) -> TrainedParts:
    """Nothing is frozen; but beside adapters no matrix is trained."""
    is_whole = model.lora is None
    return TrainedParts(0, (float(is_whole),) * (model.num_layers + model.num_predictions), trains_head=is_whole)
