"""Axes: the mesh of one rank, connected.

An `Axis` is what layers receive: how many ranks share something, which of them this is, and the group to talk over.
An axis of size 1 has no group, and every collective over it is the identity, so single-process code is the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import torch.distributed as dist

from megalite.parallel.mesh import AxisName, Mesh


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as seen by one rank."""

    name: str = "none"
    size: int = 1
    rank: int = 0
    """Index along this axis, not the global rank."""
    group: dist.ProcessGroup | None = None
    """None exactly when size is 1."""
    global_ranks: tuple[int, ...] = (0,)
    """Global ranks along this axis, in order."""

    @cached_property
    def group_name(self) -> str:
        """As ops call the group."""
        assert self.group is not None, f"nothing to be said over {self.name}, an axis of size {self.size}"
        return self.group.group_name


SINGLE = Axis()
"""The axis of a single process."""


class TensorParallel(TypedDict):
    """What every layer is told of tensor parallelism."""

    tp: Axis
    sequence_parallel: bool
    """Between layers the stream is cut over tokens, instead of being whole on every rank."""


@dataclass(frozen=True)
class Axes:
    """The axes of one rank, each named by what its ranks share; the mesh's dp is in two of them."""

    mesh: Mesh
    global_rank: int
    pp: Axis
    cp: Axis
    tp: Axis
    batch: Axis
    """The ranks that divide the global batch: every dp of this pp, cp and tp. Each reads samples of its own, and the
    cp ranks of one read the same."""
    replicas: Axis
    """The ranks that hold the same part of the model and see other tokens: every dp and cp of this pp and tp.
    Gradients and losses are summed over it, ZeRO divides its states over it."""
    world: Axis
    model: Axis
    """The ranks that together hold one replica of the weights: every pp and tp of this dp and cp. Gradient norms are
    summed over it."""
    stage: Axis
    """The ranks that together update one pipeline stage under ZeRO: every dp, cp and tp of this pp."""
    ep: Axis
    """Of the replicas those that have other experts: tokens travel over it to theirs."""
    expert_replicas: Axis
    """Of the replicas those that have the same experts. Gradients of experts are summed over it, and ZeRO divides their
    states over it: the tokens of the others have come over `ep`."""

    def replicas_of(self, *, is_expert: bool) -> Axis:
        """The ranks that hold the same weight, an expert's or one that all replicas have."""
        return self.expert_replicas if is_expert else self.replicas


ALONG: dict[str, tuple[AxisName, ...]] = {
    "pp": ("pp",),
    "cp": ("cp",),
    "tp": ("tp",),
    "batch": ("dp",),
    "replicas": ("dp", "cp"),
    "model": ("pp", "tp"),
    "stage": ("dp", "cp", "tp"),
}
"""By name of an axis, the axes of the mesh along which the ranks of one of its groups differ."""


def connect(mesh: Mesh, global_rank: int) -> Axes:
    """Create the communication groups of a mesh. Every rank calls this once, in the same order.

    Needs `torch.distributed` initialised with `mesh.world_size` ranks, unless that is 1.
    """
    assert mesh.world_size == 1 or dist.get_world_size() == mesh.world_size
    world = connect_world(mesh.world_size, global_rank)
    made = {world.global_ranks: world.group}
    axes = {name: _join(name, mesh.groups(*along), global_rank, made) for name, along in ALONG.items()}
    experts = {"ep": mesh.expert_groups(), "expert_replicas": mesh.expert_replicas()}
    axes |= {name: _join(name, groups, global_rank, made) for name, groups in experts.items()}
    return Axes(mesh, global_rank, **axes, world=world)


def connect_world(world_size: int, global_rank: int) -> Axis:
    """All ranks, before they have agreed on a mesh."""
    group = dist.group.WORLD if world_size > 1 else None
    return Axis("world", world_size, global_rank, group, tuple(range(world_size)))


def connect_ends(axes: Axes) -> Axis:
    """The first and the last pipeline stage of this rank's dp, cp and tp, for what both hold; alone on stages between.
    Collective over the world."""
    mesh, last = axes.mesh, axes.pp.size - 1
    groups = [(ranks[0], ranks[last]) for ranks in mesh.groups("pp")]
    middle = [(rank,) for rank in range(mesh.world_size) if mesh.coords(rank).pp not in (0, last)]
    return _join("ends", (*groups, *middle), axes.global_rank, {})


def connect_sharers(axes: Axes, num_kv_heads: int) -> Axis:
    """The tensor-parallel ranks that have queries of the same key and value head: more than one where tp is larger than
    the number of these heads, which then divides it. Collective over the world."""
    size = max(1, axes.tp.size // num_kv_heads)
    if size == axes.tp.size:
        return axes.tp
    groups = [ranks[first : first + size] for ranks in axes.mesh.groups("tp") for first in range(0, len(ranks), size)]
    return _join("sharers", tuple(groups), axes.global_rank, {})


@dataclass(frozen=True)
class ReplicaGroups:
    """The replicas in groups, each of which has all weights among its ranks (hybrid sharding)."""

    shards: Axis
    """The ranks of a group."""
    copies: Axis
    """Those that hold the same in each group."""
    stage: Axis
    """The ranks of a group with their tensor-parallel ones: who has one copy of the stage."""


def connect_groups(axes: Axes, count: int) -> ReplicaGroups:
    """Divide the replicas into so many groups, of ranks that follow one another: nodes, where dp does not lie within
    one. Collective over the world."""
    if count == 1:
        return ReplicaGroups(axes.replicas, SINGLE, axes.stage)
    replicas, stages = (axes.mesh.groups(*ALONG[name]) for name in ("replicas", "stage"))
    size, with_tp = axes.replicas.size // count, axes.stage.size // count
    shards = tuple(ranks[first : first + size] for ranks in replicas for first in range(0, len(ranks), size))
    copies = tuple(ranks[first::size] for ranks in replicas for first in range(size))
    together = tuple(ranks[first : first + with_tp] for ranks in stages for first in range(0, len(ranks), with_tp))
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    found = {"shards": shards, "copies": copies, "stage_shards": together}
    joined = {name: _join(name, groups, axes.global_rank, made) for name, groups in found.items()}
    return ReplicaGroups(joined["shards"], joined["copies"], joined["stage_shards"])


def connect_hops(axes: Axes, size: int | None) -> ReplicaGroups | None:
    """The replicas in groups of so many neighbours; None without a size. Collective over the world."""
    return None if size is None else connect_groups(axes, axes.replicas.size // size)


def _join(
    name: str,
    groups: tuple[tuple[int, ...], ...],
    global_rank: int,
    made: dict[tuple[int, ...], dist.ProcessGroup | None],
) -> Axis:
    """Make every group of an axis that none has made (a collective call, so all ranks make all of them) and return
    this rank's."""
    for ranks in groups:
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = dist.new_group(list(ranks))
    (mine,) = (ranks for ranks in groups if global_rank in ranks)
    axis = Axis(name, len(mine), mine.index(global_rank), made.get(mine), mine)
    if axis.group is not None:
        axis.group_name  # noqa: B018  kept from now on: compiled code cannot find it out
    return axis
