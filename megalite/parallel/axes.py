"""Axes: the mesh of one rank, connected.

An `Axis` is what layers receive: how many ranks share something, which of them this is, and the group to talk over.
An axis of size 1 has no group, and every collective over it is the identity, so single-process code is the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megalite.parallel.mesh import AXIS_NAMES, AxisName, Mesh


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


SINGLE = Axis()
"""The axis of a single process."""


@dataclass(frozen=True)
class Axes:
    """The four axes of one rank, and the whole world as a fifth."""

    mesh: Mesh
    global_rank: int
    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    world: Axis
    model: Axis
    """The ranks that together hold one replica of the weights: every pp and tp of this dp and cp. Gradient norms are
    summed over it."""
    stage: Axis
    """The ranks that together update one pipeline stage under ZeRO: every dp, cp and tp of this pp."""


PLANES: dict[str, tuple[AxisName, ...]] = {"model": ("dp", "cp"), "stage": ("pp",)}
"""Groups over several axes: by name, the axes whose place all ranks of a group share."""


def connect(mesh: Mesh, global_rank: int) -> Axes:
    """Create the communication groups of a mesh. Every rank calls this once, in the same order.

    Needs `torch.distributed` initialised with `mesh.world_size` ranks, unless that is 1.
    """
    assert mesh.world_size == 1 or dist.get_world_size() == mesh.world_size
    axes = {name: _connect_axis(mesh, name, global_rank) for name in AXIS_NAMES}
    everyone = tuple(range(mesh.world_size))
    world_group = dist.group.WORLD if mesh.world_size > 1 else None
    world = Axis("world", mesh.world_size, global_rank, world_group, everyone)
    model, stage = (_connect_plane(mesh, name, keys, global_rank) for name, keys in PLANES.items())
    return Axes(mesh, global_rank, **axes, world=world, model=model, stage=stage)


def _connect_axis(mesh: Mesh, name: AxisName, global_rank: int) -> Axis:
    return _join(name, mesh.groups(name), global_rank)


def _connect_plane(mesh: Mesh, name: str, fixed: tuple[AxisName, ...], global_rank: int) -> Axis:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        place = mesh.coords(rank)
        groups.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(rank)
    return _join(name, tuple(tuple(ranks) for ranks in groups.values()), global_rank)


def _join(name: str, groups: tuple[tuple[int, ...], ...], global_rank: int) -> Axis:
    """Make every group of an axis (a collective call, so all ranks make all of them) and return this rank's."""
    mine: Axis | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if global_rank in ranks:
            mine = Axis(name, len(ranks), ranks.index(global_rank), group, ranks)
    assert mine is not None
    return mine
