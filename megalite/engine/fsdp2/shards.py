"""The rows of each parameter that FSDP2 keeps on this rank, and their gradients.

Every parameter is cut over the replicas by its first dim, in equal runs of rows; the last ranks may have fewer, or
none. Between steps there is nothing else: rows in fp32, which are what is updated.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.engine.fsdp2.modules import Divided
from megalite.model.initialize import WeightSource
from megalite.parallel.axes import SINGLE, Axes, Axis, ReplicaGroups


class Shard:
    """This rank's rows of one parameter.

    Args:
        parameter: divided; the object lasts, whatever stands in its module during a pass.
        replicas: the ranks that divide it.
    """

    def __init__(self, parameter: nn.Parameter, replicas: Axis):
        self._parameter = parameter
        rows, row_size = parameter.shape[0], math.prod(parameter.shape[1:])
        first = min(-(-rows // replicas.size) * replicas.rank, rows)
        self.begin = first * row_size
        """Numbers of the flattened parameter before them."""
        self.rows = _here(parameter)
        """Live memory, with the parameter's other dims."""
        self.master = self.rows.detach().view(-1)
        """What the optimizer works on."""

    @property
    def gradient(self) -> Tensor:
        """The gradients of a step, flat, reduced; zeros where there were none."""
        grad = self._parameter.grad
        return torch.zeros_like(self.master) if grad is None else _here(grad).view(-1)

    def round_weights(self) -> None:
        """Weights are rounded where they are gathered."""

    def forget_gradients(self) -> None:
        self._parameter.grad = None


class ShardPartition:
    """See `engine.partition.Partition`."""

    divides_state = divides_weights = True

    def __init__(self, shards: dict[nn.Parameter, Shard], divided: Divided, axes: Axes, groups: ReplicaGroups):
        self._shards, self._divided = shards, divided
        self._axes, self._groups = axes, groups
        self.axis = groups.stage

    def shards(self, *, is_expert: bool) -> Axis:
        return self._axes.expert_replicas if is_expert and self._axes.ep.size > 1 else self._groups.shards

    def state_copies(self, *, is_expert: bool) -> Axis:
        return SINGLE if is_expert and self._axes.ep.size > 1 else self._groups.copies

    def weight_copies(self, *, is_expert: bool) -> Axis:
        return self.state_copies(is_expert=is_expert)

    def part_of(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        shard = self._shards[parameter]
        return (shard.begin, shard.master) if shard.master.numel() else None

    def updates(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad

    def flat_weights(self) -> list[Tensor]:
        return [shard.master for parameter, shard in self._shards.items() if self.updates(parameter)]

    def held(self, parameter: nn.Parameter) -> Tensor:
        return self._shards[parameter].rows

    def refresh(self, weights: WeightSource, *, with_still: bool = True) -> None:
        self._divided.let_go()

    def spare(self) -> list[Tensor]:
        return [torch.empty_like(flat) for flat in self.flat_weights()]


def _here(x: Tensor) -> Tensor:
    """The part of a divided tensor that is in this rank's memory, as a view."""
    return cast("DTensor", x)._local_tensor
