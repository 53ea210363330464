"""The engine: what the trainer may ask of whatever does the training steps.

Nothing of DeepSpeed shows through. Both engines compute the same numbers: the loss is the mean over the valid tokens of
the whole global batch, by their weights where the data has any, and the gradient norm is that of this loss, before
clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from megalite.data.loader import Batch
from megalite.engine.hooks import UpdateHooks
from megalite.engine.parts import Part
from megalite.model.initialize import LocalWeight, WeightSource
from megalite.model.transformer import Stage
from megalite.optim.averaging import AveragingState
from megalite.optim.groups import Pacing
from megalite.optim.optimizer import OwnedState
from megalite.optim.slices import Slice
from megalite.parallel.axes import Axis

NO_TOKENS = "no token of the batch counts in the loss"
"""Why a step is skipped."""

LossScaling = dict[str, float]
"""What fp16's dynamic loss scaling remembers, equal on all ranks; empty where nothing is scaled."""


GradientObserver = Callable[[nn.Parameter, Tensor, int], None]
"""Given a parameter, its gradient in one micro-batch, and which of the rank's that is."""


Ask = Callable[[], Sequence[int]]
"""What a rank has to tell all others, as whole numbers; asked for once a step, when its gradients are there."""


def nothing() -> Sequence[int]:
    """Nothing to tell."""
    return ()


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Mean over the valid tokens of the global batch, by their weights, before the update; NaN where it has none."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    num_tokens: int
    """Valid tokens of the global batch: those that counted in the loss, whatever they weigh."""
    skipped: bool = False
    """The weights were left alone."""
    why: str = ""
    """The reason of a skip."""
    further: Sequence[float] = ()
    """The same of each layer that predicts further ahead, over as many tokens: those that end a document count 0."""
    told: Sequence[int] = ()
    """What ranks had to tell, each number added up over all of them. It comes along with loss and norm."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Of the loss, further means for metrics.jsonl."""


class LossSum(NamedTuple):
    """What a forward pass over a global batch found."""

    total: float
    """The sum of weight x cross-entropy over the valid tokens."""
    num_tokens: int
    """Valid tokens."""
    weight: float
    """The sum of their weights, by which `total` is divided: their number where nothing weighs otherwise."""


class NonFiniteLossError(RuntimeError):
    """The loss is NaN or infinite on some rank; raised on all ranks before the weights are touched."""


@dataclass(frozen=True)
class LocalState:
    """One canonical weight of this rank with its elementwise state, in fp32: tensors of the rectangle's shape."""

    local: LocalWeight
    tensors: dict[str, Tensor]
    """`weight`, and by kind the state that has a number for each of its numbers."""


@dataclass(frozen=True)
class HeldWeight:
    """What a rank holds of a parameter between steps, and where its copies are."""

    name: str
    """Of the parameter."""
    tensor: Tensor
    """Live memory: the parameter, or this rank's part of it."""
    copied_over: tuple[Axis, ...]
    """Along these axes every rank holds the same bits."""


class Engine(Protocol):
    """Runs training steps on this rank's share of the model and of the batch."""

    stage: Stage
    hooks: UpdateHooks
    """Who wants a say around the update."""
    clip_norm: float | None
    """The largest gradient norm of the coming step, the same on all ranks; None for no clipping. At first
    `optimizer.clip_grad_norm`."""

    observed_weight: float

    def train_step(self, batches: Sequence[Batch], lr: float, ask: Ask = nothing) -> StepResult:
        """Run one optimizer step over this rank's micro-batches of the global batch. All ranks call it together, with
        as many numbers to tell.

        Raises:
            NonFiniteLossError: the loss is not finite and `health.stop_on_nonfinite` is set.
        """
        ...

    def eval_step(self, batches: Sequence[Batch]) -> LossSum:
        """The losses of one global batch, added up, without touching anything."""
        ...

    def token_losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The cross-entropy of every token of this dp rank's micro-batches, fp32 `[t]` each, on all its ranks.

        Touches nothing. All ranks call it together, with equally many micro-batches; tokens that the loss mask leaves
        out have a value that means nothing.
        """
        ...

    def observe_gradients(self, observer: GradientObserver) -> Callable[[], None]:
        """From now on tell somebody the gradient of every parameter of this rank in each micro-batch, before it is
        added to others, reduced or cut. Returns what ends that.

        A valid token weighs `observed_weight` x its weight / (that of all of the global batch) in them, times the loss
        scale.
        """
        ...

    def set_pacing(self, pacing: Pacing) -> None:
        """Set what the coming steps have besides their rate, the same on all ranks."""
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within it the weights are those of the run's model: where the optimizer averages (`optim.averaging`) the
        averages, else what they always are. For evaluation; behind it they are what they were, to the last bit.
        Collective."""
        ...

    def averaging(self) -> AveragingState:
        """What the averages remember of the steps so far, equal on all ranks; empty where nothing is averaged."""
        ...

    def set_averaging(self, state: AveragingState) -> None:
        """Go on from such a state."""
        ...

    def slices(self) -> Sequence[Slice]:
        """What this rank updates of weights and elementwise state: live memory, without communication."""
        ...

    def gradients(self) -> Sequence[Tensor]:
        """The gradient of each of `slices` as it enters the update, clipped: only within `hooks.around_update`."""
        ...

    def owned_states(self) -> Iterator[OwnedState]:
        """Optimizer state that this rank keeps for whole rows or weights."""
        ...

    def owned_parts(self) -> Iterator[Part]:
        """Weights and optimizer state that this rank stands for, as rectangles: those of all ranks tile every weight
        once. Collective over the ranks of a stage, which all walk it to the end."""
        ...

    def held_weights(self) -> list[HeldWeight]:
        """What this rank holds of every parameter, in an order that all ranks of its stage share."""
        ...

    def local_weights(self) -> Iterator[LocalState]:
        """This rank's weights and elementwise state, one at a time. Collective over dp: all ranks walk it to the end.

        A tensor is yielded on every dp rank; which of them writes it is the caller's choice.
        """
        ...

    def loss_scaling(self) -> LossScaling:
        """The state of fp16's dynamic loss scaling, `scale` among it, equal on all ranks; empty for other formats."""
        ...

    def set_loss_scaling(self, state: LossScaling) -> None:
        """Go on from such a state."""
        ...

    def load(self, source: WeightSource, state: dict[str, WeightSource], num_updates: int) -> None:
        """Set the weights, their masters, optimizer state by kind, and the optimizer's step counter, at any time.

        Collective.
        """
        ...

    def close(self) -> None:
        """Release hooks and groups; the engine is not used afterwards."""
        ...
