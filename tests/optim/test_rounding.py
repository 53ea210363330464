"""Stochastic rounding to bf16: one of the two neighbours, right on average, the same however a weight is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megalite.architecture.weights import Rectangle, Weight
from megalite.model.initialize import LocalWeight
from megalite.optim import slices
from megalite.optim.rounding import round_by_chance, update_and_round
from megalite.optim.slices import Slice, places_in_whole
from megalite.parallel.random import name_seed

SEEDS = range(2000)


def local_weight(
    shape: tuple[int, ...], start: tuple[int, ...] | None = None, part: tuple[int, ...] | None = None
) -> LocalWeight:
    """A weight of a shape, or a rectangle of it."""
    rectangle = Rectangle(start or (0,) * len(shape), part or shape)
    return LocalWeight(Weight("w", shape, "blocks.0", "w"), rectangle, "w", 0)


def roundings(x: Tensor) -> Tensor:
    """A row for each seed, fp32."""
    places = torch.arange(x.numel())
    return torch.stack([round_by_chance(x.clone(), places, name_seed(seed, "x")).float() for seed in SEEDS])


def test_goes_to_a_neighbour_and_is_right_on_average():
    """Of numbers of all sizes and both signs: nothing but the two bf16 numbers around, and a mean within five standard
    errors of the number."""
    torch.manual_seed(0)
    x = torch.randn(500) * 10.0 ** torch.randint(-20, 20, (500,))
    found = roundings(x)
    toward_zero = (x.view(torch.int32) >> 16 << 16).view(torch.float32)
    away = ((x.view(torch.int32) >> 16 << 16) + (1 << 16)).view(torch.float32)
    assert ((found == toward_zero) | (found == away)).all()
    gap = (away - toward_zero).double()
    share = ((x - toward_zero).double() / gap).clamp(0.0, 1.0)
    error = (found.double().mean(dim=0) - x.double()) / gap
    allowed = 5 * (share * (1 - share) / len(SEEDS)).sqrt() + 1 / len(SEEDS)
    assert (error.abs() <= allowed).all()
    assert abs(float(error.mean())) < 5 * 0.5 / (len(SEEDS) * 500) ** 0.5


def test_bf16_numbers_stay():
    """Whatever the seed: zero weights stay zero, and a weight without an update stays what it is."""
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-100, 1.0 + 2.0**-7])
    assert torch.equal(roundings(x), x.expand(len(SEEDS), -1))


def test_numbers_and_steps_are_rounded_independently():
    """Of equal numbers halfway between two, half go up, and neighbours and seeds know nothing of another."""
    x = torch.full((10000,), 1.0 + 2.0**-8)
    places = torch.arange(10000)
    first, second = (round_by_chance(x.clone(), places, name_seed(seed, "x")).float() > x for seed in (1, 2))
    assert float(first.float().mean()) == pytest.approx(0.5, abs=0.025)
    for one, other in ((first[:-1], first[1:]), (first, second)):
        assert abs(float(torch.corrcoef(torch.stack([one, other]).float())[0, 1])) < 0.05


def test_small_updates_arrive():
    """A thousand updates of a 2000th of the weight: rounding to the nearest loses every one, by chance they add up to
    what fp32 has."""
    part = Slice(local_weight((1000,)), 0, {"weight": torch.ones(1000, dtype=torch.bfloat16)})
    nearest = torch.ones(1000, dtype=torch.bfloat16)

    def add(weights: list[Tensor], columns: dict[str, list[Tensor]]) -> None:
        weights[0].add_(columns["direction"][0])

    for step in range(1000):
        update_and_round([part], {"direction": [torch.full((1000,), 5e-4)]}, add, seed=1, step=step)
        nearest += 5e-4
    assert torch.equal(nearest, torch.ones_like(nearest))
    weight = part.tensors["weight"].float()
    assert float(weight.mean()) == pytest.approx(1.5, abs=0.005)
    assert float(weight.std()) < 0.1


@pytest.mark.parametrize("chunk", [7, 64])
def test_cuts_and_chunks_change_nothing(monkeypatch, chunk):
    """The columns of a matrix in two halves, each in slices that end anywhere, and in small chunks, are rounded as the
    whole matrix is."""
    torch.manual_seed(0)
    before, change = torch.randn(12, 10).bfloat16(), torch.randn(12, 10) * 1e-3

    def add(weights: list[Tensor], columns: dict[str, list[Tensor]]) -> None:
        weights[0].sub_(columns["direction"][0])

    def update(matrix: Tensor, direction: Tensor, local: LocalWeight, bounds: tuple[int, ...]) -> Tensor:
        flat, moves = matrix.clone().view(-1), direction.reshape(-1)
        for start, stop in itertools.pairwise(bounds):
            part = Slice(local, start, {"weight": flat[start:stop]})
            update_and_round([part], {"direction": [moves[start:stop]]}, add, seed=3, step=9)
        return flat.view(matrix.shape)

    whole = update(before, change, local_weight((12, 10)), (0, 120))
    monkeypatch.setitem(slices.CHUNK, "cpu", chunk)
    halves = [
        update(
            before[:, first : first + 5].contiguous(),
            change[:, first : first + 5],
            local_weight((12, 10), start=(0, first), part=(12, 5)),
            (0, 13, 37, 60),
        )
        for first in (0, 5)
    ]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    assert not torch.equal(whole, (before.float() - change).bfloat16())


def test_places():
    """Of each number of a part, where it lies in the whole weight read row by row."""
    whole = torch.arange(12 * 10).view(12, 10)
    local = local_weight((12, 10), start=(4, 5), part=(6, 5))
    part = Slice(local, 7, {"weight": torch.zeros(20)})
    expected = whole[4:10, 5:].reshape(-1)[7:27]
    assert torch.equal(places_in_whole(part, slice(0, 20), torch.device("cpu")), expected)
    assert torch.equal(places_in_whole(part, slice(3, 9), torch.device("cpu")), expected[3:9])
