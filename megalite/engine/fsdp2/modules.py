"""A stage whose parameters torch's FSDP2 divides: gathered a block at a time, and reduced behind its backward pass.

    root             embedding, final norm, head, ...     gathered through the whole pass
      block          its parameters                       gathered twice, forward and backward
        experts      over the replicas that have the same ones

Sums, not means: a token has its weight in the mean over the global batch already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalite.layers.experts import Experts
from megalite.model.initialize import CUT_MARK, EXPERT_MARK
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes, Axis, ReplicaGroups

MARKS = (CUT_MARK, EXPERT_MARK)


class Divided:
    """Divides a stage, in place. Collective.

    Args:
        groups: of the replicas.
        dtype: that the stage computes in; its parameters are fp32.
        reduce_dtype: that gradients are added up in.
    """

    def __init__(
        self,
        stage: Stage,
        axes: Axes,
        groups: ReplicaGroups,
        device: torch.device,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ):
        marks = {name: [getattr(each, mark) for mark in MARKS] for name, each in stage.named_parameters()}
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        alone = _alone(axes)
        everybody = _mesh_of_groups(axes, groups, alone, device)
        of_experts = _mesh(axes.expert_replicas, alone, device)
        blocks = stage.all_blocks()
        experts = [layer for block in blocks for layer in block.modules() if isinstance(layer, Experts)]
        experts = experts if axes.ep.size > 1 else []  # else they are divided as all others are
        for module, mesh in (*((each, of_experts) for each in experts), *((each, everybody) for each in blocks)):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(stage, mesh=everybody, mp_policy=policy)
        self._modules: list[Any] = [each for each in stage.modules() if isinstance(each, FSDPModule)]
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for name, parameter in stage.named_parameters():
            for mark, value in zip(MARKS, marks[name], strict=True):
                setattr(parameter, mark, value)

    def let_go(self) -> None:
        """Keep nothing gathered."""
        for module in self._modules:
            module.reshard()


def _alone(axes: Axes) -> dist.ProcessGroup | None:
    """A group of this rank, for axes of one. Collective over the world."""
    groups = [dist.new_group([rank]) for rank in range(axes.world.size)]
    return groups[axes.global_rank]


def _mesh(axis: Axis, alone: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    """Of the ranks that divide parameters."""
    group = axis.group if axis.size > 1 else alone
    assert group is not None
    return DeviceMesh.from_group(group, device.type)


def _mesh_of_groups(
    axes: Axes, groups: ReplicaGroups, alone: dist.ProcessGroup | None, device: torch.device
) -> DeviceMesh:
    """Of the ranks that divide parameters, and, where there are more groups than one, of those that have copies."""
    if groups.copies.size == 1:
        return _mesh(groups.shards, alone, device)
    found = (groups.copies.group, groups.shards.group if groups.shards.size > 1 else alone)
    both = [group for group in found if group is not None]
    ranks = torch.tensor(axes.replicas.global_ranks).view(groups.copies.size, -1)
    return DeviceMesh.from_group(both, device.type, mesh=ranks, mesh_dim_names=("copies", "shards"))
