"""Matrix products: of every shape that a layer or the head asks for, and as exact where oneDNN makes them."""

from __future__ import annotations

import re

import pytest
import torch

from megalite.config.plan import PRODUCT_PIECE
from megalite.host import CPU_CLASSES
from megalite.layers import cpu_products
from megalite.layers import gemm as backends
from megalite.layers.cpu_products import BLAS, MEASURED, ONEDNN
from megalite.layers.gemm import ONEDNN_FROM, PLAIN, CudaGemm, OneDnnGemm, PlainGemm, choose_gemm
from tests.kit.paths import ROOT

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
    if by == "medium" and not backends._leave_products_to_onednn():
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


@pytest.fixture
def machine(monkeypatch, untouched):
    """Makes this a machine of another class, on which nothing has been chosen, and says what multiplies there."""

    def chosen(name: str, *arguments: object, flags: str = "") -> tuple[str, type]:
        monkeypatch.setattr(backends, "cpu_class", lambda: name)
        monkeypatch.setattr(backends, "cpu_flags", lambda: set(flags.split()))
        backends._leave_products_to_onednn.cache_clear()
        torch.set_float32_matmul_precision("highest")
        gemm = choose_gemm(*(arguments or ("cpu", torch.float32)))
        return backends.fp32_products(), type(gemm)

    return chosen


ONEDNN_TAKEN, BLAS_TAKEN = (ONEDNN, OneDnnGemm), (BLAS, PlainGemm)


def test_the_class_of_cpu_chooses(machine, monkeypatch):
    """By the table, without a trial: for products of fp32 on a CPU, of a model that is not tiny."""
    monkeypatch.delattr(backends, "_error_of_product")
    for name in ("zen4", "zen5"):
        assert machine(name) == ONEDNN_TAKEN
        assert machine(name, "cpu", torch.float32, ONEDNN_FROM) == ONEDNN_TAKEN
        assert machine(name, "cpu", torch.float32, ONEDNN_FROM - 1) == BLAS_TAKEN
        assert machine(name, "cpu", torch.bfloat16) == BLAS_TAKEN
        assert machine(name, "cuda", torch.float32) == (BLAS, CudaGemm)
    for name in ("zen3", "xeon-amx"):
        assert machine(name) == BLAS_TAKEN


@pytest.mark.parametrize("name", ["other-AuthenticAMD-27-avx512f", "zen5"])
def test_a_cpu_that_is_not_in_the_table_is_tried(name, machine, monkeypatch):
    """Taken only where it is exact; else torch is left as it was. A row is for the versions of torch that it was
    measured with."""
    monkeypatch.setattr(cpu_products, "NEWEST_TORCH", (2, 13 if name.startswith("other") else 1))
    for error, taken in ((2e-3, BLAS_TAKEN), (3e-7, ONEDNN_TAKEN)):
        monkeypatch.setattr(backends, "_error_of_product", lambda *shape, error=error: error)
        assert machine(name, flags="avx512f") == taken
    monkeypatch.delattr(backends, "_error_of_product")
    assert machine("other-AuthenticAMD-23-avx2", flags="avx2") == BLAS_TAKEN
    assert machine("other-GenuineIntel-6-avx512f", flags="avx512f GenuineIntel") == BLAS_TAKEN


def test_products_that_round_are_named(machine):
    """Where a run asked for them, and the CPU has units to."""
    machine("xeon-amx", flags="amx_bf16 GenuineIntel")
    torch.set_float32_matmul_precision("medium")
    assert backends.fp32_products() == "oneDNN, rounded to bf16"


def test_the_table_is_what_was_measured():
    """Every class of CPU has a row, with the ratio of its page."""
    assert MEASURED.keys() == {each.name for each in CPU_CLASSES}
    for row in MEASURED.values():
        _, section = (ROOT / "docs" / row.page).read_text().split(f"\n## {row.heading}", 1)
        plain, medium = (
            float(re.search(rf"\| plain PyTorch, compiled{also}[^|]*\| ([\d,]+)", section)[1].replace(",", ""))
            for also in ("", ', "medium"')
        )
        assert row.ratio == pytest.approx(medium / plain, abs=0.005)
