"""FP8 numbers and scales against the formats' definitions, number by number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megalite.layers.fp8.quantise import E4M3, E5M2, WHOLE, cast, scale_of, spread, tile_amax
from tests.layers.fp8.kit import draw

FORMATS = {E4M3: (4, 3, 448.0), E5M2: (5, 2, 57344.0)}
"""Bits of exponent and mantissa, largest number (OCP 8-bit floating point specification, 2023)."""


def numbers_of(fp8: torch.dtype) -> list[float]:
    """All finite numbers of a format from its definition, sign left out."""
    exponent_bits, mantissa_bits, limit = FORMATS[fp8]
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    found = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    found += [(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for m in range(steps)]
    return [number for number in found if number <= limit]


def nearest(value: float, numbers: list[float]) -> float:
    """The nearest number, ties to the one with an even mantissa, i.e. an even place in the list."""
    size = min(abs(value), numbers[-1])
    best = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - size), i % 2))
    return math.copysign(numbers[best], value)


@pytest.mark.parametrize("fp8", FORMATS, ids=str)
def test_rounding_is_to_nearest_and_saturates(fp8):
    """Numbers of all sizes, ties, and those beyond the largest."""
    numbers = numbers_of(fp8)
    ties = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    spread_out = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3).exp2().tolist()
    values = torch.tensor([*numbers, *ties, *spread_out, 2 * numbers[-1], 1e30]).reshape(1, -1)
    values = torch.cat((values, -values))
    rounded = cast(values, torch.ones(1, 1), WHOLE, fp8).data.float()
    assert rounded.flatten().tolist() == [nearest(value, numbers) for value in values.flatten().tolist()]


@pytest.mark.parametrize("tile", [(None, None), (1, None), (1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("shape", [(256, 256), (130, 200), (3, 5)])
def test_maxima_of_tiles(tile, shape):
    """Each tile's maximum, also of those that the matrix does not fill."""
    x = draw(*shape, seed=0)
    rows, columns = tile[0] or shape[0], tile[1] or shape[1]
    expected = [
        [x[i : i + rows, j : j + columns].abs().max().item() for j in range(0, shape[1], columns)]
        for i in range(0, shape[0], rows)
    ]
    amax = tile_amax(x, tile)
    assert amax.tolist() == expected
    whole = spread(amax, x.shape, tile).expand(shape)
    assert all(whole[i, j] == expected[i // rows][j // columns] for i in range(shape[0]) for j in range(shape[1]))


@pytest.mark.parametrize("fp8", FORMATS, ids=str)
def test_scales(fp8):
    """The largest number of a tile becomes the format's largest; powers of two are the largest that do not exceed
    that; tiles of zeros stay zero."""
    limit = FORMATS[fp8][2]
    amax = torch.tensor([[1e-20, 0.1, 1.0, 3.0, 448.0, 449.0, 1e20]])
    torch.testing.assert_close(scale_of(amax, fp8, power_of_two=False) * amax, torch.full_like(amax, limit))
    for scale, size in zip(scale_of(amax, fp8, power_of_two=True)[0].tolist(), amax[0].tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert scale * size <= limit * (1 + 1e-6) < 2 * scale * size * (1 + 2e-6)
    zeros = torch.zeros(4, 4)
    for power_of_two in (False, True):
        done = cast(zeros, scale_of(tile_amax(zeros, WHOLE), fp8, power_of_two=power_of_two), WHOLE, fp8)
        assert done.dequantise().count_nonzero() == 0


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_fault_stays_visible(bad, power_of_two):
    """An infinite or undefined number leaves its tile undefined, and does not become the largest FP8 number."""
    x = torch.ones(2, 2)
    x[0, 0] = bad
    done = cast(x, scale_of(tile_amax(x, (1, None)), E4M3, power_of_two=power_of_two), (1, None), E4M3)
    assert done.dequantise()[0].isnan().any()
    assert torch.equal(done.dequantise()[1], torch.ones(2))


def test_transposed_matrix():
    """Transposing rounds nothing anew."""
    x = draw(130, 70, seed=1)
    done = cast(x, scale_of(tile_amax(x, (1, 32)), E4M3, power_of_two=True), (1, 32), E4M3)
    assert torch.equal(done.t().dequantise(), done.dequantise().t())
