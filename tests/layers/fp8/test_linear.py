"""The three products of an FP8 linear layer against plain formulas, by every backend and recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.layers.fp8.products import scaled_mm
from megalite.layers.gemm import PLAIN
from tests.layers.fp8.kit import EMULATED, STATELESS, difference, draw, fp8_layer, run

SUM_TOLERANCE = 1e-6
"""fp32 sums in another order than float64's."""

FP8_ERROR = {"e4m3": (0.02, 0.045), "hybrid": (0.03, 0.08)}
"""Relative error of a product of normal numbers: 3 bits of mantissa lose 2^-4 at most and 0.026 in the mean square a
factor, 2 bits twice that; two factors add up in squares."""

TOKENS, INPUTS, OUTPUTS = 160, 192, 144
"""Not multiples of 128, so that the last blocks are not full."""


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = draw(TOKENS, INPUTS, seed=0, dtype=dtype), draw(OUTPUTS, INPUTS, seed=1, dtype=dtype)
    return x, weight, draw(TOKENS, OUTPUTS, seed=2, dtype=dtype)


def rounded(x: Tensor, rows: int, columns: int, limit: float, fp8: torch.dtype, power_of_two: bool) -> Tensor:
    """FP8 and back, tile by tile, in float64: the definition, without a line of the project."""
    out = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns].float()
            scale = limit / tile.abs().max()
            if power_of_two:
                scale = 2.0 ** torch.floor(torch.log2(scale.double())).float()
            data = (tile * scale).clamp(-limit, limit).to(fp8)
            out[i : i + rows, j : j + columns] = data.double() / scale.double()
    return out


def formula(recipe: str, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """y, dx and dw, each matrix rounded along the dim that its product reduces over."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    whole = 10**6
    vectors, blocks = {"current": (whole, whole), "rowwise": (1, whole), "block": (1, 128), "mxfp8": (1, 32)}, {}
    blocks = {**vectors, "block": (128, 128)}
    powers = recipe != "current"
    gradient = (e5m2, 57344.0) if recipe == "current" else (e4m3, 448.0)

    def as_vectors(matrix: Tensor, fp8: torch.dtype = e4m3, limit: float = 448.0) -> Tensor:
        return rounded(matrix, *vectors[recipe], limit, fp8, powers)

    def as_weight(matrix: Tensor) -> Tensor:
        return rounded(matrix, *blocks[recipe], 448.0, e4m3, powers)

    return {
        "y": as_vectors(x) @ as_weight(weight).T,
        "dx": as_vectors(grad, *gradient) @ as_weight(weight.T.contiguous()).T,
        "dw": as_vectors(grad.T.contiguous(), *gradient) @ as_vectors(x.T.contiguous()).T,
    }


@pytest.mark.parametrize("recipe", STATELESS)
def test_products_follow_the_formula(recipe):
    """Result and both gradients, to the order of summation."""
    x, weight, grad = tensors()
    expected = formula(recipe, x, weight, grad)
    for name, found in run(fp8_layer(recipe), x, weight, grad).items():
        assert difference(found, expected[name]) < SUM_TOLERANCE, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("recipe", "settings"), [("current", {}), ("current", {"format": "e4m3"}), ("rowwise", {})])
def test_scaled_mm_equals_emulation(recipe, settings, dtype):
    """torch's own FP8 products and emulated ones, on this CPU, differ by the order of summation and a bf16 rounding."""
    inputs = tensors(dtype)
    emulation = run(fp8_layer(recipe, EMULATED, **settings), *inputs)
    for name, found in run(fp8_layer(recipe, scaled_mm, **settings), *inputs).items():
        assert found.dtype == dtype
        assert difference(found, emulation[name]) < (SUM_TOLERANCE if dtype == torch.float32 else 2e-3), name


@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_error_is_that_of_the_format(form):
    """How far FP8 products of normal numbers are from exact ones: what the format's mantissa says."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(256, 256, generator=generator) for _ in range(3))
    exact, low, high = run(PLAIN, x, weight, grad), *FP8_ERROR[form]
    found = run(fp8_layer("current", format=form), x, weight, grad)
    assert FP8_ERROR["e4m3"][0] < difference(found["y"], exact["y"]) < FP8_ERROR["e4m3"][1]
    for name in ("dx", "dw"):
        assert low < difference(found[name], exact[name]) < high, name


def test_small_scales_serve_outliers():
    """With one channel three hundred times the others, rows, blocks and blocks of 32 keep the rest better than one
    scale for all, counted over the other channels."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[:, 7] *= 3e5
    kept = {}
    for recipe in STATELESS:
        layer = fp8_layer(recipe)
        others = torch.arange(512) != 7
        kept[recipe] = difference(layer.quantise("activation", x).dequantise()[:, others], x[:, others])
    assert kept["mxfp8"] < kept["block"] < kept["rowwise"] <= kept["current"] * 1.001, kept


@pytest.mark.parametrize("recipe", STATELESS)
@pytest.mark.parametrize("keep", [True, False])
def test_weights_are_rounded_once_a_step(recipe, keep, monkeypatch):
    """Over three micro-batches the weight is rounded once for each way it is used, and anew after the step; where
    weights may not be kept, at each use. The numbers are the same."""
    layer = fp8_layer(recipe, keep_weights=keep)
    roundings = []
    quantise = type(layer).quantise

    def counting(self, role, x, *, transposed=False):
        roundings.append((role, transposed))
        return quantise(self, role, x, transposed=transposed)

    monkeypatch.setattr(type(layer), "quantise", counting)
    x, weight, grad = tensors()
    first = run(layer, x, weight, grad)
    for _ in range(2):
        assert all(torch.equal(first[name], again) for name, again in run(layer, x, weight, grad).items())
    once = {("weight", False)} if layer.recipe.is_symmetric("weight") else {("weight", False), ("weight", True)}
    weights = [each for each in roundings if each[0] == "weight"]
    assert set(weights) == once
    assert len(weights) == (len(once) if keep else 3 * 2)
    layer.forget_weights()
    assert not torch.equal(run(layer, x, 2 * weight, grad)["y"], first["y"])


def test_evaluation_keeps_nothing():
    """Without gradients a weight is rounded for this use alone."""
    layer = fp8_layer("current")
    x, weight, _ = tensors()
    with torch.no_grad():
        before = layer.linear(x, weight)
        assert torch.equal(layer.linear(x, 2 * weight), 2 * before)
