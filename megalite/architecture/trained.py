"""What of a model a step trains."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.architecture.architecture import Architecture


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
