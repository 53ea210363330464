"""The first precision seam: how matrices are multiplied.

A `Gemm` is a backend: `linear` is what a linear layer calls, with gradients; `multiply` and `add_product` are the bare
products for code that makes its own gradients. Parameters and communication stay with the layer, so every backend has
the same parameter names, the same cuts and the same checkpoints. A `LinearGemm` has `linear` alone: in FP8 each layer
has one of its own (`layers.fp8`), since scales belong to a layer.

On CPUs that are not Intel's MKL, which torch calls for fp32, takes a slow path; on a Zen 5 core oneDNN is 2.3 times as
fast, and torch has it too. Which of them multiplies is a table by class of CPU (`layers.cpu_products`).

Legend: `[m, k]` and `[n, k]` multiply to `[m, n]`, both reduced over their last dim, as in `x [t, in]` and
`weight [out, in]`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.plan import PRODUCT_PIECE
from megalite.host import cpu_class, cpu_flags
from megalite.layers.cpu_products import BLAS, ONEDNN, measured_products


class LinearGemm(Protocol):
    """What a linear layer multiplies with."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients."""
        ...


class Gemm(LinearGemm, Protocol):
    """A backend of matrix products."""

    def multiply(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """`[m, k]` and `[n, k]` -> `[m, n]`, in `out` where it is given; no gradient."""
        ...

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """`total [m, n] += left.T @ right` with `left [k, m]` and `right [k, n]`; no gradient."""
        ...

    def begin_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """The same, in place of what stood in `total`."""
        ...


class PlainGemm:
    """Torch's own products, in the tensors' own format."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(left, right.t()) if out is None else torch.mm(left, right.t(), out=out)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            total.addmm_(left.t(), right)
            return
        for part, of_left in _pieces(total, left):
            part.add_(torch.mm(of_left.t(), right))

    def begin_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            torch.mm(left.t(), right, out=total)
            return
        for part, of_left in _pieces(total, left):
            part.copy_(torch.mm(of_left.t(), right))


def _pieces(total: Tensor, left: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows at a time of `total [m, n]`, and the columns of `left [k, m]` that they are made of."""
    rows = max(1, PRODUCT_PIECE // max(1, total.shape[1]))
    return zip(total.split(rows), left.split(rows, 1), strict=True)


LONGEST_SUM = 4096
"""Numbers that oneDNN is given to add up at once."""


class OneDnnGemm(PlainGemm):
    """The same where oneDNN makes products: one that adds up more numbers than `LONGEST_SUM` is made in pieces, in 0.9
    of the time for 32000 of them on a Zen 5."""

    def multiply(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        if left.shape[1] <= LONGEST_SUM or left.dtype != torch.float32:
            return super().multiply(left, right, out)
        first, *others = zip(left.split(LONGEST_SUM, 1), right.split(LONGEST_SUM, 1), strict=True)
        total = super().multiply(*first, out)
        for piece, of_right in others:
            total.addmm_(piece, of_right.t())
        return total


PLAIN = PlainGemm()


class CudaGemm(PlainGemm):
    """The same on a GPU, whose products add to sums in fp32 by themselves: not rounded before, and without a pass."""

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            return super().add_product(total, left, right)
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)

    def begin_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            return super().begin_product(total, left, right)
        torch.mm(left.t(), right, out_dtype=total.dtype, out=total)


ONEDNN_FROM = 2**20
"""Multiplications in a product from which on oneDNN is faster: it takes 8 us more to begin with, and attention begins
many (64 x 64 x 64 of them: 14 us for MKL's 7; 128 x 128 x 128: 29 for 41)."""

TRIED_SHAPES = ((64, 64, 64), (200, 384, 1024), (512, 64, 512))
"""Rows, numbers that each product adds up, and columns."""

EXACT = 1e-6
"""Relative error of a product in fp32, at most; one that rounds to bf16 is a thousand times as far off."""


def choose_gemm(device_type: str, dtype: torch.dtype, product_size: int | None = None) -> Gemm:
    """The fastest backend for a device, a format and a model. It depends on nothing else, so reruns are bit-equal.

    Where the table of CPUs says so, torch is told to leave fp32 products to oneDNN, for the whole process.

    Args:
        product_size: multiplications in a usual product of the whole model, however it is cut; None for many.
    """
    if device_type == "cuda":
        return CudaGemm()
    is_worth_it = product_size is None or product_size >= ONEDNN_FROM
    if device_type == "cpu" and dtype == torch.float32 and is_worth_it and _leave_products_to_onednn():
        return OneDnnGemm()
    return PLAIN


def fp32_products() -> str:
    """What multiplies fp32 numbers on this CPU, as torch has been told in this process so far; for people, and to be
    compared between ranks and attempts."""
    if torch.get_float32_matmul_precision() != "medium":
        return BLAS
    return f"{ONEDNN}, rounded to bf16" if "amx_bf16" in cpu_flags() else ONEDNN


@functools.cache
def _leave_products_to_onednn() -> bool:
    """Whether oneDNN multiplies from now on: by the table, and on CPUs that are not in it by a trial.

    Torch goes to it only where products may be rounded to bf16 (a precision of "medium"). Without units for that (AMX)
    oneDNN makes no use of the leave.
    """
    taken = measured_products(cpu_class(), torch.__version__)
    if taken is None:
        return _mkl_may_be_slow() and _tried_to_be_exact()
    if taken == ONEDNN:
        torch.set_float32_matmul_precision("medium")
    return taken == ONEDNN


def _tried_to_be_exact() -> bool:
    """Leave products to oneDNN; where a trial shows that it rounds them, all stays as it was."""
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if all(_error_of_product(*shape) < EXACT for shape in TRIED_SHAPES):
        return True
    torch.set_float32_matmul_precision(former)
    return False


def _error_of_product(rows: int, inner: int, columns: int) -> float:
    """Relative, against fp64."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(inner, size, generator=generator) for size in (rows, columns))
    wanted = left.double().t() @ right.double()
    return ((torch.mm(left.t(), right) - wanted).norm() / wanted.norm()).item()


def _mkl_may_be_slow() -> bool:
    """Whether this is a CPU with AVX-512 that is not Intel's: MKL leaves its wide units unused."""
    return "avx512f" in cpu_flags() and "GenuineIntel" not in cpu_flags()
