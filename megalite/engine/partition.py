"""What an engine keeps on this rank of each parameter, told in terms that no engine shows through.

nothing divided     every replica keeps all of its part of the model, and updates it
state divided       each replica updates a run of the numbers, and all compute with the whole     ZeRO-1, 2
weights divided     each replica keeps a run of the numbers, and they are gathered for use        ZeRO-3, FSDP2
                    or so within groups of replicas, which update the same                        FSDP2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from megalite.architecture.weights import Weight
from megalite.model.initialize import EXPERT_MARK, LocalWeight, WeightSource, local_weights
from megalite.model.transformer import Stage
from megalite.optim.slices import Slice
from megalite.parallel.axes import SINGLE, Axes, Axis


class Partition(Protocol):
    """One engine's way to divide the parameters of a stage."""

    divides_state: bool
    divides_weights: bool
    axis: Axis
    """The ranks that update the stage together: the optimizer's exchanges go over it."""

    def shards(self, *, is_expert: bool) -> Axis:
        """The ranks that divide the state of a weight, an expert's or one that all replicas have."""
        ...

    def state_copies(self, *, is_expert: bool) -> Axis:
        """The ranks that keep and update the same."""
        ...

    def weight_copies(self, *, is_expert: bool) -> Axis:
        """The ranks that hold the same of the weight between steps."""
        ...

    def part_of(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        """The run of a flattened parameter that this rank updates: where it begins, and its numbers, the memory that
        the optimizer works on. None when it has none."""
        ...

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer works on it; not where an engine keeps frozen ones apart."""
        ...

    def flat_weights(self) -> list[Tensor]:
        """The tensors that the optimizer is given with gradients; every part lies in one."""
        ...

    def held(self, parameter: nn.Parameter) -> Tensor:
        """What this rank has of a parameter between steps: live memory."""
        ...

    def refresh(self, weights: WeightSource, *, with_still: bool = True) -> None:
        """What the optimizer works on was set from outside: compute with it from now on. Collective.

        Args:
            weights: all of it, for whoever finds it there sooner than at other ranks.
            with_still: weights that no step changes were set, too.
        """
        ...

    def spare(self) -> list[Tensor]:
        """Memory like `flat_weights`, which nobody needs between steps."""
        ...


class OverReplicas:
    """Who divides what, and who has copies, where all replicas are alike.

    Args:
        divides_weights: which they do only where they divide the state.
    """

    def __init__(self, axes: Axes, *, divides_state: bool, divides_weights: bool):
        self.divides_state, self.divides_weights = divides_state, divides_weights
        self.axis = axes.stage if divides_state else axes.tp
        self._axes = axes

    def shards(self, *, is_expert: bool) -> Axis:
        """See `Partition`."""
        return self._axes.replicas_of(is_expert=is_expert) if self.divides_state else SINGLE

    def state_copies(self, *, is_expert: bool) -> Axis:
        """See `Partition`."""
        return SINGLE if self.divides_state else self._axes.replicas_of(is_expert=is_expert)

    def weight_copies(self, *, is_expert: bool) -> Axis:
        """See `Partition`."""
        return SINGLE if self.divides_weights else self._axes.replicas_of(is_expert=is_expert)

    def updates(self, parameter: nn.Parameter) -> bool:
        """See `Partition`."""
        return True


def slices_of(stage: Stage, axes: Axes, partition: Partition) -> Iterator[Slice]:
    """What this rank stands for of the weights, vocabulary padding left out."""
    rows: dict[str, list[LocalWeight]] = {}
    for local in local_weights(stage):
        rows.setdefault(local.parameter_name, []).append(local)
    for name, parameter in stage.named_parameters():
        is_other_replica = partition.state_copies(is_expert=getattr(parameter, EXPERT_MARK)).rank != 0
        found = partition.part_of(parameter)
        if found is None:
            continue
        for part in _cut(rows[name], *found):
            yield replace(part, is_copy=is_other_replica or is_copy_in_model(part.local, axes))


def _cut(rows: list[LocalWeight], begin: int, numbers: Tensor) -> Iterator[Slice]:
    """A run of a flattened parameter by the weights that it holds."""
    end, first = begin + numbers.numel(), 0
    for local in rows:
        last = first + math.prod(local.rectangle.shape)
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            yield Slice(local, start - first, {"weight": numbers.narrow(0, start - begin, stop - start)})
        first = last


def is_copy_in_model(local: LocalWeight, axes: Axes) -> bool:
    """Whether another rank of the same model replica stands for a weight: replicated ones and the embedding's
    pair count once."""
    return is_copy_at_end(local.weight, axes) or (local.weight.cut is None and axes.tp.rank != 0)


def is_copy_at_end(weight: Weight, axes: Axes) -> bool:
    """Whether this is the embedding's copy on the stage of the head."""
    return weight.layer == "embedding" and axes.pp.rank > 0
