"""A linear layer in FP4 against products of matrices that loops have rounded, and the mean of its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.config.schema import Fp4Config
from megalite.layers.fp4.hadamard import Hadamard
from megalite.layers.fp4.linear import Fp4Linear, Places, TokenKeys, make_fp4_recipe
from megalite.layers.fp8.linear import WeightSharding
from megalite.layers.gemm import PLAIN
from megalite.layers.weight_gradients import SummedLinear
from megalite.parallel.axes import SINGLE
from tests.layers.fp4.kit import draw, quantised

TOKENS, INNER, OUT = 70, 32, 64
"""Tokens are no whole number of blocks."""


def make_layer(settings: dict[str, Any], plain: Any = PLAIN, first_token: int = 0) -> Fp4Linear:
    return Fp4Linear(
        make_fp4_recipe(Fp4Config(**settings), seed=3),
        plain,
        PLAIN,
        WeightSharding(SINGLE, 0),
        Places(torch.arange(OUT), torch.arange(INNER)),
        keys=TokenKeys(torch.arange(TOKENS) + first_token),
        seed=1,
        keep_weights=True,
    )


def products(layer: Fp4Linear, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """y, dx, dw."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = layer.linear(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


def transformed(x: Tensor, size: int) -> Tensor:
    """By Hadamard's matrix from the parity of common bits, with the run's signs."""
    signs = Hadamard(size, seed=3).matrix[:, 0].sign()
    parity = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix = signs.unsqueeze(1) * torch.tensor(parity) / size**0.5
    return torch.cat([part @ matrix for part in x.split(size, 1)], 1)


def rounded(x: Tensor, kind: str, size: int | None = None) -> Tensor:
    return torch.tensor(quantised(x if size is None else transformed(x, size), kind))


CASES: dict[str, dict[str, Any]] = {
    "nvfp4": {"format": "nvfp4", "square_weights": False},
    "mxfp4": {"format": "mxfp4", "forward": True},
    "mxfp4, unrounded forward, no transform": {"format": "mxfp4", "hadamard": "none"},
    "nvfp4, both transformed": {
        "format": "nvfp4", "hadamard": "backward", "hadamard_size": 64, "square_weights": False
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_rounded_matrices(name: str):
    """Result and gradients of a layer that rounds to nearest, by autograd and handed over: each product has its
    operands rounded along the dim that it reduces over, transformed where it should be, tokens followed by zeros."""
    settings = {**CASES[name], "stochastic_rounding": "none"}
    full, kind = Fp4Config(**settings).filled, settings["format"]
    x, weight, grad = draw(TOKENS, INNER), draw(OUT, INNER, seed=1), draw(TOKENS, OUT, seed=2) * 0.01
    size, both = full.hadamard_size if full.hadamard != "none" else None, full.hadamard == "backward"
    behind = torch.zeros(-TOKENS % max(size or 0, 32), 1)
    padded = [torch.cat((each, behind.expand(-1, each.shape[1]))).t() for each in (grad, x)]
    y = rounded(x, kind) @ rounded(weight, kind).t() if full.forward else x @ weight.t()
    dx = rounded(grad, kind, size if both else None) @ rounded(weight.t(), kind, size if both else None).t()
    dw = rounded(padded[0], kind, size) @ rounded(padded[1], kind, size).t()
    parameter, taken = nn.Parameter(weight), {}
    summed = SummedLinear(parameter, PLAIN, lambda p, made: taken.update({p: made.make()}))
    handing = make_layer(settings, summed)
    wanted, found = [y, dx, dw], products(make_layer(settings), x, weight, grad)
    handing.linear(x.clone().requires_grad_(), parameter).backward(grad)
    for one, other in zip([*wanted, dw], [*found, taken[parameter]], strict=True):
        assert (one - other).norm() < 1e-5 * one.norm(), name  # transforms add up in another order


def test_squares_serve_both_passes():
    """NVFP4's recipe multiplies by the same rounded weight in y and dx: both are products with a matrix that is found
    by putting the identity through the layer."""
    settings = {"format": "nvfp4", "stochastic_rounding": "none"}
    weight, grad = draw(OUT, INNER, seed=1), draw(TOKENS, OUT, seed=2)
    layer = make_layer(settings)
    layer._keys.now = torch.arange(INNER)
    seen = layer.linear(torch.eye(INNER), weight).t()
    assert torch.equal(seen, layer.recipe.format.quantise(weight, tile=(16, 16)))
    dx = products(make_layer(settings), draw(TOKENS, INNER), weight, grad)[1]
    torch.testing.assert_close(dx, rounded(grad, "nvfp4") @ seen, rtol=1e-4, atol=1e-3)


def test_gradients_by_chance_have_the_right_mean():
    """MXFP4's recipe: the mean of dx and dw over tokens of 200 steps comes to the exact ones as the root of their
    number; chances are functions of the token: the same tokens have the same gradients, others have others."""
    x, weight, grad = draw(TOKENS, INNER), draw(OUT, INNER, seed=1), draw(TOKENS, OUT, seed=2)
    settings, num = {"format": "mxfp4"}, 200
    found = [products(make_layer(settings, first_token=i * TOKENS), x, weight, grad)[1:] for i in range(num)]
    again = products(make_layer(settings), x, weight, grad)[1:]
    for which, exact in enumerate((grad @ weight, grad.t() @ x)):
        all_of = torch.stack([each[which] for each in found])
        assert torch.equal(all_of[0], again[which])
        assert not torch.equal(all_of[0], all_of[1])
        one = (all_of - exact).norm() / num**0.5
        assert (all_of.mean(0) - exact).norm() < 1.2 * one / num**0.5 + 1e-4 * exact.norm()
