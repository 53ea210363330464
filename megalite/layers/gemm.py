"""The first precision seam: how matrices are multiplied.

A `Gemm` is a backend: `linear` is what a linear layer calls, with gradients; `multiply` and `add_product` are the bare
products for code that makes its own gradients. Parameters and communication stay with the layer, so every backend has
the same parameter names, the same cuts and the same checkpoints. A `LinearGemm` has `linear` alone: in FP8 each layer
has one of its own (`layers.fp8`), since scales belong to a layer.

    plain    torch's own products
    onednn   the same, by oneDNN: on CPUs that are not Intel's, MKL (which torch calls for fp32) takes a slow path;
             on a Zen 5 core oneDNN is 2.3 times as fast

Legend: `[m, k]` and `[n, k]` multiply to `[m, n]`, both reduced over their last dim, as in `x [t, in]` and
`weight [out, in]`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearGemm(Protocol):
    """What a linear layer multiplies with."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients."""
        ...


class Gemm(LinearGemm, Protocol):
    """A backend of matrix products."""

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """`[m, k]` and `[n, k]` -> `[m, n]`; no gradient."""
        ...

    def new_total(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A zero `[rows, columns]` in the memory layout that `add_product` likes best."""
        ...

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """`total [m, n] += left.T @ right` with `left [k, m]` and `right [k, n]`; no gradient."""
        ...


class PlainGemm:
    """Torch's own products, in the tensors' own format."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right.t())

    def new_total(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, columns, dtype=dtype, device=like.device)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        if total.dtype == left.dtype:
            total.addmm_(left.t(), right)
        else:
            total += torch.mm(left.t(), right)


SMALL_PRODUCT = 1 << 20
"""Multiply-adds below which oneDNN takes longer to begin than MKL to end; measured on a Zen 5."""


class OneDnnGemm:
    """fp32 products on a CPU by oneDNN."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return _OneDnnLinear.apply(x, weight)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return _onednn_product(left, right)

    def new_total(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(columns, rows, dtype=dtype).t()

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        total.t().add_(_onednn_product(right.t(), left.t()))


PLAIN = PlainGemm()


def choose_gemm(device_type: str, dtype: torch.dtype) -> Gemm:
    """The fastest backend for a device and format. It depends on the kind of machine only, so reruns are bit-equal."""
    if device_type == "cpu" and dtype == torch.float32 and _mkl_is_slow() and _has_onednn():
        return OneDnnGemm()
    return PLAIN


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether this is a CPU with AVX-512 that is not Intel's: MKL leaves its wide units unused."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "GenuineIntel" not in info and " avx512f" in info


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T`."""
    if torch.compiler.is_compiling():
        return _opaque_product(left, right)
    return _multiply_now(left, right)


def _multiply_now(left: Tensor, right: Tensor) -> Tensor:
    if left.numel() == 0 or right.numel() == 0:
        return left.new_zeros(left.shape[0], right.shape[0])
    if left.numel() * right.shape[0] < SMALL_PRODUCT:
        return torch.mm(left, right.t())
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


# An op of our own, so that torch.compile leaves it whole. Elsewhere torch's way to it takes as long as a small product.
_opaque_product = torch.library.custom_op("megalite::onednn_product", _multiply_now, mutates_args=())


@_opaque_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0])


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _onednn_product(grad, weight.t()), _onednn_product(grad.t(), x.t())
