"""What an engine is given to keep on a rank, and the bytes that it says it does: for the planner, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megalite.architecture.costs import ELEMENT_BYTES
from megalite.architecture.weights import vocab_rows_per_rank, weight_table
from megalite.config.engine import choose_engine
from megalite.config.plan import RunPlan
from megalite.config.schema import Config
from megalite.config.weight_groups import is_trained


@dataclass(frozen=True)
class InBlocks:
    """Bytes of weights and gradients that come and go while blocks work, from moment to moment of a backward pass."""

    at_head: int = 0
    """While the loss works."""
    coming: int = 0
    """Besides, while a block's weights come; what it works with is not there yet."""
    first: int = 0
    """While the last block works, the first in this direction."""
    behind_first: int = 0
    """When it is done, and what it kept is gone."""
    second: int = 0
    """While the next one works."""
    behind_second: int = 0
    """When that is done, too."""
    head_gradient: int = 0
    """That is there from the loss to the end."""
    product: int = 0
    """Of a block's largest gradient, as it is made and widened to be added to its sum, in place of what else the block
    has for a moment."""

    @property
    def most(self) -> int:
        """Of all moments, the head's gradient apart."""
        return self.coming + max(self.at_head, self.first, self.behind_first, self.second, self.behind_second)


NOTHING = InBlocks()


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank of a pipeline stage."""

    weights: int
    """Those that compute."""
    gradients: int
    optimizer: int
    """Master weights and the optimizer's state."""
    buffers: int
    """Gradients on their way, weights that are gathered: through the whole step."""
    in_blocks: InBlocks = NOTHING
    after_backward: int = 0
    """Of such, when the backward pass is over."""
    late_gradients: int = 0
    """Of gradients, what is not there before the step's first backward pass."""
    host: int = 0
    """In the host's memory, beside all this."""


class EngineNumbers(NamedTuple):
    """What an engine is given to keep on a rank."""

    parameters: int
    """Of the rank before ZeRO cuts them."""
    updated: int
    """Those whose masters ZeRO divides among the replicas: with expert parallelism more."""
    state_bytes: int
    """Of the optimizer's state of these, before ZeRO cuts it."""
    still: int = 0
    """Of the parameters those that are frozen, of which an engine keeps nothing else."""
    still_updated: int = 0
    """The same of `updated`."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return self.parameters - self.still

    @property
    def masters(self) -> int:
        """Numbers that the replicas update together."""
        return self.updated - self.still_updated


def outer_parameters(plan: RunPlan) -> int:
    """Numbers of a rank that are outside of blocks, where there is no pipeline."""
    outside = [weight for weight in weight_table(plan.model, blocks=()).values() if not weight.is_inner]
    return sum(prod(weight.local_shape(plan.tp)) for weight in outside)


def has_gradient(name: str, config: Config) -> bool:
    """Whether a gradient of a weight is made. DeepSpeed makes one of a frozen weight, too, and clears it."""
    optimizer = config.optimizer
    return not optimizer.groups or choose_engine(config) == "deepspeed" or is_trained(name, optimizer)


def head_numbers(config: Config, plan: RunPlan) -> int:
    """Numbers of a rank in the head's matrix, which may be the embedding's; 0 where no gradient of it is made."""
    name = "embedding.weight" if plan.model.tie_embeddings else "head.weight"
    rows = min(vocab_rows_per_rank(plan.model.vocab_size, plan.tp), plan.model.vocab_size)
    return rows * plan.model.hidden_size if has_gradient(name, config) else 0


def exact_gradient_bytes(config: Config) -> int:
    """Of a gradient on its way, or a sum of them, that is not rounded to few bits."""
    return ELEMENT_BYTES[config.precision.reduce_dtype or "fp32"]
