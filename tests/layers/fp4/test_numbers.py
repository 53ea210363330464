"""FP4 numbers and scales against the formats' definitions, number by number in Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from megalite.layers.fp4.hadamard import Hadamard
from megalite.layers.fp4.numbers import FORMATS, by_chance, to_nearest
from megalite.parallel.random import uniform
from tests.layers.fp4.kit import E2M1, draw, nearest, quantised


def test_every_number_tie_and_chance():
    """All fifteen numbers, what lies half between two of them, what is too large, and a thousand others: to nearest,
    and by chances."""
    ties = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    others = (torch.rand(500, generator=torch.Generator().manual_seed(0)) * 7).tolist()
    values = torch.tensor([*E2M1, *ties, 6.5, 100.0, *others])
    values = torch.cat((values, -values))
    assert to_nearest(values).tolist() == [nearest(value) for value in values.tolist()]
    assert set(to_nearest(values).tolist()) == {sign * number for number in E2M1 for sign in (-1.0, 1.0)}
    chance = uniform(torch.arange(1), torch.arange(len(values)), 3)[0]
    pairs = zip(values.tolist(), chance.tolist(), strict=True)
    assert by_chance(values, chance).tolist() == [nearest(value, at) for value, at in pairs]


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_are_those_of_loops(kind: str):
    """To nearest and by chance, blocks of rows; squares are blocks whose largest number is that of all their rows."""
    x, fp4 = draw(8, 96), FORMATS[kind]
    chance = uniform(torch.arange(8), torch.arange(96), 1)
    for at in (None, chance):
        found = fp4.quantise(x, tile=(1, fp4.block), chance=at)
        torch.testing.assert_close(found, torch.tensor(quantised(x, kind, at)), rtol=1e-6, atol=0.0)
    size = fp4.block
    x = draw(size, 2 * size)
    squares = fp4.quantise(x, tile=(size, size))
    rows = torch.cat([part.reshape(1, -1) for part in x.split(size, 1)])  # a square's numbers in a row, 16 at a time
    amax = rows.abs().amax(1)
    for part, found, largest in zip(x.split(size, 1), squares.split(size, 1), amax, strict=True):
        alike = torch.cat((part, torch.full((size, size), largest.item())), 1).view(size, 2, size).transpose(0, 1)
        assert found.abs().max() <= largest * (7 / 6 if kind == "nvfp4" else 1)
        assert (found - part).abs().max() <= alike[1].max() / 6 * (1.1 if kind == "nvfp4" else 2)
    assert torch.equal(squares.t().contiguous(), fp4.quantise(x.t(), tile=(size, size)))


@pytest.mark.parametrize("kind", FORMATS)
def test_chance_has_the_right_mean(kind: str):
    """The mean over 4000 roundings is the number, within four standard errors of where they lie; and rounding to
    nearest is further off. In NVFP4 those numbers are left out that a scale rounded down clamps."""
    x, fp4, num = draw(2, 64), FORMATS[kind], 4000
    keys = torch.arange(num * 2)
    chance = uniform(keys, torch.arange(64), 7).view(num, 2, 64)
    roundings = torch.stack([fp4.quantise(x, tile=(1, fp4.block), chance=each) for each in chance])
    error = (roundings.double().mean(0) - x).abs()
    reach = roundings.abs().amax(0).unflatten(1, (-1, fp4.block)).amax(2).repeat_interleave(fp4.block, 1)
    counted = x.abs() <= reach
    allowed = 4.0 * roundings.double().std(0) / num**0.5 + reach / num + 1e-6 * x.abs()  # some come up once, or never
    assert counted.float().mean() > (0.9 if kind == "nvfp4" else 0.99)
    assert ((error <= allowed) | ~counted).all()
    assert (fp4.quantise(x, tile=(1, fp4.block)) - x).abs()[counted].sum() > 5 * error[counted].sum()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_fault_stays_visible(kind: str):
    """An infinite or undefined number leaves its block undefined, and in NVFP4 the tensor that it scales."""
    for bad in (float("inf"), float("nan")):
        x = torch.ones(2, 64)
        x[0, 0] = bad
        assert FORMATS[kind].quantise(x, tile=(1, FORMATS[kind].block))[0, 0].isnan()
    assert not FORMATS[kind].quantise(torch.zeros(2, 64), tile=(1, FORMATS[kind].block)).any()


@pytest.mark.parametrize("size", [16, 64])
def test_hadamard_leaves_products_alone(size: int):
    """The matrix is orthogonal, of entries of one size, and no other seed's; a product of two transformed matrices is
    that of the matrices; an outlier becomes as many equal numbers."""
    transform = Hadamard(size, seed=5)
    matrix = transform.matrix.double()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.double))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))
    assert not torch.equal(transform.matrix, Hadamard(size, seed=6).matrix)
    x, w = draw(8, 128), draw(4, 128, seed=1)
    torch.testing.assert_close(transform(x) @ transform(w).t(), x @ w.t(), rtol=1e-4, atol=1e-2)
    spike = torch.zeros(1, size)
    spike[0, 3] = 8.0
    torch.testing.assert_close(transform(spike).abs(), torch.full((1, size), 8.0 / size**0.5))
