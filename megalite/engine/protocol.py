"""The engine: what the trainer may ask of whatever does the training steps.

Nothing of DeepSpeed shows through. Both engines compute the same numbers: the loss is the sum over the valid tokens of
the whole global batch divided by their number, and the gradient norm is that of this loss, before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megalite.data.loader import Batch
from megalite.model.initialize import LocalWeight, WeightSource
from megalite.model.transformer import Stage

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Optimizer state kept for every weight, by its name in torch's AdamW."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Mean over the valid tokens of the global batch, before the update."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    num_tokens: int
    """Valid tokens of the global batch: those that counted in the loss."""
    skipped: bool = False
    """The weights were left alone."""
    why: str = ""
    """The reason of a skip."""


class NonFiniteLossError(RuntimeError):
    """The loss is NaN or infinite on some rank; raised on all ranks before the weights are touched."""


@dataclass(frozen=True)
class LocalState:
    """One canonical weight of this rank with its optimizer state, in fp32: tensors of the rectangle's shape."""

    local: LocalWeight
    tensors: dict[str, Tensor]
    """`weight` and each of `MOMENTS`."""


def nothing() -> None:
    """What `Engine.before_update` does at first."""


class Engine(Protocol):
    """Runs training steps on this rank's share of the model and of the batch."""

    stage: Stage
    before_update: Callable[[], None]
    """Called in every step once the gradients are there, when weights and moments are about to change. Whoever still
    reads them, as a save in the background does, sets it and lets the update wait."""

    def train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Run one optimizer step over this rank's micro-batches of the global batch. All ranks call it together.

        Raises:
            NonFiniteLossError: the loss is not finite and `health.stop_on_nonfinite` is set.
        """
        ...

    def eval_step(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Sum of the cross-entropies, and number of valid tokens, of one global batch without touching anything."""
        ...

    def local_weights(self) -> Iterator[LocalState]:
        """This rank's weights and moments, one at a time. Collective over dp: all ranks walk it to the end.

        A tensor is yielded on every dp rank; which of them writes it is the caller's choice.
        """
        ...

    def load(self, source: WeightSource, moments: dict[str, WeightSource], num_updates: int) -> None:
        """Set master weights, moments and the optimizer's step counter. Collective."""
        ...

    def close(self) -> None:
        """Release hooks and groups; the engine is not used afterwards."""
        ...
