"""The backends of matrix products agree, forward and backward, for every shape that a layer or the head asks for."""

from __future__ import annotations

import pytest
import torch

from megalite.layers import gemm as backends
from megalite.layers.gemm import PLAIN, OneDnnGemm, PlainGemm, choose_gemm

FLOAT32 = 1e-5
"""Relative to the largest entry; another order of summation."""

needs_onednn = pytest.mark.skipif(not backends._has_onednn(), reason="this build of torch has no oneDNN linear")
SHAPES = [(7, 5, 3), (64, 32, 96), (1, 16, 16), (33, 48, 1), (16, 8, 0)]
"""Tokens, inputs, outputs; the last is a rank whose share of the vocabulary is padding only."""


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    scale = want.abs().max().item() if want.numel() else 1.0
    return got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=FLOAT32 * max(scale, 1.0))


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES)
def test_onednn_linear_equals_torch(shape):
    """Result and both gradients of a linear layer."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator, requires_grad=True) for n in (tokens, outputs))
    results = []
    for gemm in (PLAIN, OneDnnGemm()):
        y = gemm.linear(x, weight)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(close(got, want) for got, want in zip(results[1], results[0], strict=True))


@pytest.mark.parametrize("gemm", [PLAIN, pytest.param(OneDnnGemm(), marks=needs_onednn)])
@pytest.mark.parametrize("shape", SHAPES)
def test_bare_products(gemm, shape):
    """`multiply` on plain and transposed operands, and `add_product` onto what is there already."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(tokens, inputs, generator=generator), torch.randn(tokens, outputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    assert close(gemm.multiply(x, weight), x @ weight.T)
    assert close(gemm.multiply(grad, weight.t()), grad @ weight)
    total = gemm.new_total(outputs, inputs, like=weight, dtype=torch.float32)
    assert total.shape == weight.shape
    assert total.count_nonzero() == 0
    for _ in range(2):
        gemm.add_product(total, grad, x)
    assert close(total, 2 * grad.T @ x)


@needs_onednn
def test_choice_depends_on_the_machine_alone(monkeypatch):
    """oneDNN serves fp32 on CPUs where MKL is slow, and nothing else."""
    monkeypatch.setattr(backends, "_mkl_is_slow", lambda: True)
    assert isinstance(choose_gemm("cpu", torch.float32), OneDnnGemm)
    assert isinstance(choose_gemm("cpu", torch.bfloat16), PlainGemm)
    assert isinstance(choose_gemm("cuda", torch.float32), PlainGemm)
    monkeypatch.setattr(backends, "_mkl_is_slow", lambda: False)
    assert isinstance(choose_gemm("cpu", torch.float32), PlainGemm)
