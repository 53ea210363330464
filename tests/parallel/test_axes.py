"""The groups of a connected mesh, checked by talking over them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megalite.parallel.axes import SINGLE, Axis, connect
from megalite.parallel.collectives import all_reduce
from megalite.parallel.mesh import Mesh
from tests.kit.spawn import run_ranks

AXES = ("pp", "batch", "cp", "replicas", "tp", "world", "model", "stage")

GROUPS = {
    Mesh(pp=2, tp=2): {
        "pp": [(0, 2), (1, 3)],
        "batch": [(0,), (1,), (2,), (3,)],
        "cp": [(0,), (1,), (2,), (3,)],
        "tp": [(0, 1), (2, 3)],
        "replicas": [(0,), (1,), (2,), (3,)],
        "stage": [(0, 1), (2, 3)],
        "world": [(0, 1, 2, 3)],
        "model": [(0, 1, 2, 3)],
    },
    Mesh(dp=2, tp=2): {
        "pp": [(0,), (1,), (2,), (3,)],
        "batch": [(0, 2), (1, 3)],
        "cp": [(0,), (1,), (2,), (3,)],
        "tp": [(0, 1), (2, 3)],
        "replicas": [(0, 2), (1, 3)],
        "stage": [(0, 1, 2, 3)],
        "world": [(0, 1, 2, 3)],
        "model": [(0, 1), (2, 3)],
    },
    Mesh(pp=2, dp=2): {
        "pp": [(0, 2), (1, 3)],
        "batch": [(0, 1), (2, 3)],
        "cp": [(0,), (1,), (2,), (3,)],
        "tp": [(0,), (1,), (2,), (3,)],
        "replicas": [(0, 1), (2, 3)],
        "stage": [(0, 1), (2, 3)],
        "world": [(0, 1, 2, 3)],
        "model": [(0, 2), (1, 3)],
    },
    Mesh(dp=2, cp=2): {
        "pp": [(0,), (1,), (2,), (3,)],
        "batch": [(0, 2), (1, 3)],
        "cp": [(0, 1), (2, 3)],
        "tp": [(0,), (1,), (2,), (3,)],
        "replicas": [(0, 1, 2, 3)],
        "stage": [(0, 1, 2, 3)],
        "world": [(0, 1, 2, 3)],
        "model": [(0,), (1,), (2,), (3,)],
    },
    Mesh(cp=2, tp=2): {
        "pp": [(0,), (1,), (2,), (3,)],
        "batch": [(0,), (1,), (2,), (3,)],
        "cp": [(0, 2), (1, 3)],
        "tp": [(0, 1), (2, 3)],
        "replicas": [(0, 2), (1, 3)],
        "stage": [(0, 1, 2, 3)],
        "world": [(0, 1, 2, 3)],
        "model": [(0, 1), (2, 3)],
    },
}
"""The groups of 4 ranks, written out by hand from the drawing in parallel.mesh: tp fastest, pp slowest."""


def describe(axis: Axis) -> tuple[tuple[int, ...], int, bool, int]:
    """Ranks, own index, whether there is a group, and the sum of 2**rank over the group: who really answered."""
    mine = torch.tensor(2 ** dist.get_rank())
    return axis.global_ranks, axis.rank, axis.group is not None, int(all_reduce(mine, axis))


def connect_all(meshes: list[Mesh]) -> list[dict[str, tuple]]:
    connected = [connect(mesh, dist.get_rank()) for mesh in meshes]
    return [{name: describe(getattr(axes, name)) for name in AXES} for axes in connected]


def test_every_axis_reaches_exactly_its_ranks():
    """For five meshes of 4 ranks, each axis has the ranks written out above, and a sum over it reaches exactly them."""
    meshes = list(GROUPS)
    for rank, results in enumerate(run_ranks(connect_all, 4, meshes, backend="gloo")):
        for mesh, axes in zip(meshes, results, strict=True):
            for name, seen in axes.items():
                (ranks,) = [group for group in GROUPS[mesh][name] if rank in group]
                expected = (ranks, ranks.index(rank), len(ranks) > 1, sum(2**member for member in ranks))
                assert seen == expected, f"{mesh} axis {name} rank {rank}"


def test_one_rank_needs_no_process_group():
    """A mesh of one connects without torch.distributed, and none of its axes has a group."""
    assert not dist.is_initialized()
    axes = connect(Mesh(), 0)
    for name in AXES:
        axis = getattr(axes, name)
        assert (axis.size, axis.rank, axis.group, axis.global_ranks) == (1, 0, None, (0,))
    assert (SINGLE.size, SINGLE.group) == (1, None)


def test_an_axis_is_frozen():
    """Nothing can change an axis once layers hold it."""
    with pytest.raises(AttributeError):
        SINGLE.size = 2
