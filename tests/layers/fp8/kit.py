"""Small FP8 layers for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Fp8Config
from megalite.layers.fp8.linear import CurrentScales, Fp8Linear, WeightSharding
from megalite.layers.fp8.products import Product, emulated
from megalite.layers.fp8.recipes import make_recipe
from megalite.layers.gemm import PLAIN
from megalite.parallel.axes import SINGLE

EMULATED = emulated(PLAIN)

STATELESS = ("current", "rowwise", "block", "mxfp8")
"""Recipes whose scales come from the tensor at hand."""


def fp8_layer(recipe: str, product: Product = EMULATED, *, keep_weights: bool = True, **settings: Any) -> Fp8Linear:
    """A layer on one rank, by a recipe without history."""
    made = make_recipe(Fp8Config(backend="emulate", recipe=recipe, **settings))
    return Fp8Linear(made, CurrentScales(made, WeightSharding(SINGLE, 0)), product, keep_weights=keep_weights)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, with one row and one column far larger than the rest, as activations have."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[1] *= 30.0
    x[:, 2] *= 30.0
    return x.to(dtype)


def run(layer: Any, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Result and gradients of a linear layer."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = layer.linear(x, weight)
    y.backward(grad)
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}


def difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()
