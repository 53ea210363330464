"""Matrix products: of every shape that a layer or the head asks for, and as exact where oneDNN makes them."""

from __future__ import annotations

import pytest
import torch

from megalite.config.plan import PRODUCT_PIECE
from megalite.layers import gemm as backends
from megalite.layers.gemm import PLAIN, OneDnnGemm, choose_gemm

FLOAT32 = 1e-5
"""Relative to the largest entry; another order of summation."""

SHAPES = [(7, 5, 3), (64, 32, 96), (1, 16, 16), (33, 48, 1), (16, 8, 0), (5, 8, 9001)]
"""Tokens, inputs, outputs: a rank whose share of the vocabulary is padding only, and sums that are made in pieces."""


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    scale = want.abs().max().item() if want.numel() else 1.0
    return got.shape == want.shape and torch.allclose(got.double(), want, rtol=0, atol=FLOAT32 * max(scale, 1.0))


@pytest.fixture
def untouched():
    """Leaves torch's precision as it was, and lets the next one choose anew."""
    former = torch.get_float32_matmul_precision()
    backends._leave_products_to_onednn.cache_clear()
    yield
    torch.set_float32_matmul_precision(former)
    backends._leave_products_to_onednn.cache_clear()


@pytest.mark.parametrize("gemm", [PLAIN, OneDnnGemm()], ids=["plain", "onednn"])
@pytest.mark.parametrize("by", ["highest", "medium"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bare_products(shape, by, gemm, untouched):
    """`multiply` on plain and transposed operands, and products onto what is there already, and in place of it."""
    if by == "medium" and not (backends._mkl_is_slow() and backends._leave_products_to_onednn()):
        pytest.skip("oneDNN does not multiply here, or would round")
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(tokens, inputs, generator=generator), torch.randn(tokens, outputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    assert close(gemm.multiply(x, weight), x.double() @ weight.double().T)
    assert close(gemm.multiply(grad, weight.t()), grad.double() @ weight.double())
    out = torch.full((tokens, inputs), torch.nan)
    assert gemm.multiply(grad, weight.t(), out=out) is out
    assert close(out, grad.double() @ weight.double())
    total = torch.full_like(weight, torch.nan)
    gemm.begin_product(total, grad, x)
    gemm.add_product(total, grad, x)
    assert close(total, 2 * grad.double().T @ x.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_rounded_products(shape, monkeypatch):
    """bf16's products added to sums in fp32, some rows at a time: as near as their format allows, each row once."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(tokens, size, generator=generator).bfloat16() for size in (inputs, outputs))
    exact = grad.double().T @ x.double()
    for size in (1, 40, PRODUCT_PIECE):
        monkeypatch.setattr(backends, "PRODUCT_PIECE", size)
        total = torch.full((outputs, inputs), torch.nan)
        PLAIN.begin_product(total, grad, x)
        assert torch.allclose(total.double(), exact, rtol=2.0**-8, atol=1e-5)
        PLAIN.add_product(total, grad, x)
        assert torch.allclose(total.double(), 2 * exact, rtol=2.0**-8, atol=1e-5)


def test_onednn_is_taken_only_where_it_is_exact(monkeypatch, untouched):
    """By the kind of machine alone, for fp32 on a CPU; where it rounds, torch is left as it was."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(backends, "_mkl_is_slow", lambda: False)
    choose_gemm("cpu", torch.float32)
    monkeypatch.setattr(backends, "_mkl_is_slow", lambda: True)
    choose_gemm("cpu", torch.bfloat16)
    choose_gemm("cuda", torch.float32)
    monkeypatch.setattr(backends, "_error_of_product", lambda *shape: 2e-3)
    choose_gemm("cpu", torch.float32)
    assert torch.get_float32_matmul_precision() == "highest"
    backends._leave_products_to_onednn.cache_clear()
    monkeypatch.setattr(backends, "_error_of_product", lambda *shape: 3e-7)
    choose_gemm("cpu", torch.float32)
    assert torch.get_float32_matmul_precision() == "medium"
