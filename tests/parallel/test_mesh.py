"""The mesh is pure arithmetic: checked by brute force for every mesh of up to 64 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from megalite.parallel.mesh import AXIS_NAMES, Coords, Mesh

MAX_WORLD_SIZE = 64


def meshes(world_size: int) -> Iterator[Mesh]:
    """Every mesh of a world size."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for pp, dp, cp in itertools.product(divisors, repeat=3):
        if world_size % (pp * dp * cp) == 0:
            yield Mesh(pp, dp, cp, world_size // (pp * dp * cp))


@pytest.mark.parametrize("world_size", range(1, MAX_WORLD_SIZE + 1))
def test_every_mesh(world_size: int):
    """Ranks and places correspond one to one in row-major order, tp fastest; groups partition the ranks."""
    for mesh in meshes(world_size):
        assert mesh.world_size == world_size
        places = itertools.product(*(range(mesh.size(axis)) for axis in AXIS_NAMES))
        expected = [Coords(*place) for place in places]
        assert [mesh.coords(rank) for rank in range(world_size)] == expected
        assert [mesh.rank_at(place) for place in expected] == list(range(world_size))
        for axis in AXIS_NAMES:
            groups = mesh.groups(axis)
            assert sorted(itertools.chain(*groups)) == list(range(world_size))
            assert {len(group) for group in groups} == {mesh.size(axis)}


@pytest.mark.parametrize("world_size", [1, 6, 16, 24, 64])
def test_groups_differ_in_one_coordinate(world_size: int):
    """The members of a group share every coordinate but the axis', along which they stand in order."""
    for mesh in meshes(world_size):
        for axis, rank in itertools.product(AXIS_NAMES, range(world_size)):
            members = [mesh.coords(member) for member in mesh.ranks_of(axis, rank)]
            assert [getattr(place, axis) for place in members] == list(range(mesh.size(axis)))
            assert {place._replace(**{axis: 0}) for place in members} == {mesh.coords(rank)._replace(**{axis: 0})}
            assert mesh.ranks_of(axis, rank)[getattr(mesh.coords(rank), axis)] == rank


def test_the_drawing():
    """pp=2, dp=2, tp=2 as the module's docstring draws it."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("cp") == tuple((rank,) for rank in range(8))


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 1, 2), Mesh(4, 1, 1, 2), Mesh(1, 3, 1, 4), Mesh(3, 2, 1, 1)], ids=str)
def test_order_is_deepspeeds(mesh: Mesh):
    """A rank has the same place for us and for DeepSpeed's own topology."""
    from megalite.engine.deepspeed.start import prepare_deepspeed

    prepare_deepspeed("cpu")
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.dp, num_mp=mesh.tp)
    for rank in range(mesh.world_size):
        place = mesh.coords(rank)
        assert topology.get_rank(pipe=place.pp, data=place.dp, model=place.tp) == rank


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_ranks_outside(rank: int):
    mesh = Mesh(pp=2, dp=2, tp=2)
    with pytest.raises(ValueError, match=f"rank {rank} is outside the mesh of 8 ranks"):
        mesh.coords(rank)
    with pytest.raises(ValueError, match="outside the mesh"):
        mesh.ranks_of("tp", rank)


@pytest.mark.parametrize("axis", AXIS_NAMES)
def test_empty_axis(axis: str):
    with pytest.raises(ValueError, match=f"mesh axis {axis}=0 must be at least 1"):
        Mesh(**{axis: 0})
