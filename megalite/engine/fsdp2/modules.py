"""A stage whose parameters torch's FSDP2 divides: gathered a block at a time, and reduced behind its backward pass.

    root             embedding, final norm, head, ...     gathered through the whole pass
      block          its parameters                       gathered twice, forward and backward
        experts      over the replicas that have the same ones

Sums, not means: a token has its weight in the mean over the global batch already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from megalite.engine.fsdp2.rounded import set_collectives
from megalite.engine.wire import Wire
from megalite.layers.experts import Experts
from megalite.model.initialize import CUT_MARK, EXPERT_MARK
from megalite.model.transformer import Stage
from megalite.parallel.axes import Axes, Axis, ReplicaGroups, connect_groups, connect_hops

MARKS = (CUT_MARK, EXPERT_MARK)


@dataclass(frozen=True)
class Traffic:
    """What a config says of a divided stage's weights."""

    wire: Wire
    """How they and their gradients travel."""
    reduce_within: int | None
    """Ranks that add up rounded gradients before these travel on."""
    kept_within: int | None
    """Ranks among which a block's gathered weights stay between its passes; None divides them over all again."""
    on_host: bool
    """Rows and gradients live in the host's memory."""


class Divided:
    """Divides a stage, in place. Collective.

    Args:
        groups: of the replicas.
        dtype: that the stage computes in; its parameters are fp32.
        reduce_dtype: that gradients are added up in.
        traffic: how weights and gradients travel, and where divided weights live.
    """

    def __init__(
        self,
        stage: Stage,
        axes: Axes,
        groups: ReplicaGroups,
        device: torch.device,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        traffic: Traffic,
    ):
        marks = {name: [getattr(each, mark) for mark in MARKS] for name, each in stage.named_parameters()}
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        alone = _alone(axes)
        everybody = _mesh_of_groups(axes, groups, alone, device)
        of_experts = _mesh(axes.expert_replicas, alone, device)
        blocks = stage.all_blocks()
        experts = [layer for block in blocks for layer in block.modules() if isinstance(layer, Experts)]
        experts = experts if axes.ep.size > 1 else []  # else they are divided as all others are
        keep: dict[str, Any] = {"mp_policy": policy}
        if traffic.on_host:
            keep["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        inner: list[tuple[Any, DeviceMesh]] = [(each, of_experts) for each in experts]
        inner += [(each, everybody) for each in blocks]
        with _kept_within(axes, traffic.kept_within, alone, device) as again:
            for module, mesh in inner:
                fully_shard(module, mesh=mesh, **keep, **again)
        fully_shard(stage, mesh=everybody, **keep)
        hops = connect_hops(axes, traffic.reduce_within)
        self._modules: list[Any] = [each for each in stage.modules() if isinstance(each, FSDPModule)]
        for module in self._modules:
            replicas = axes.expert_replicas if module in experts else groups.shards
            set_collectives(module, traffic.wire, replicas, hops)
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


@contextmanager
def _kept_within(
    axes: Axes, size: int | None, alone: dist.ProcessGroup | None, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Within it, what `fully_shard` needs to leave weights divided over so many neighbours after a forward pass.

    torch (2.13) makes groups for each module, of the ranks that it finds in the module's mesh: with tensor parallelism
    ranks would wait for others that make different ones. Here all modules have one mesh, of groups made once.
    """
    if size is None:
        yield {}
        return
    groups = connect_groups(axes, axes.replicas.size // size)
    mesh = _mesh_of_groups(axes, groups, alone, device)
    internals: Any = import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    common: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    kept = common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    theirs = internals._get_post_forward_mesh_info
    internals._get_post_forward_mesh_info = lambda *_: kept
    try:
        yield {"reshard_after_forward": size}
    finally:
        internals._get_post_forward_mesh_info = theirs


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
