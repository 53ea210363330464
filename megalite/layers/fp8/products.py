"""Products of FP8 matrices: by the tensor cores' own instruction, or by the same numbers in fp32.

    emulated    FP8 numbers widened to fp32 and multiplied there: any recipe on any device, to study it
    scaled_mm   torch's `_scaled_mm`: one scale a tensor or a row; on GPUs from Ada and Hopper on, and on CPUs too

Both take `[m, k]` and `[n, k]` and give `[m, n]`. FP8 products are exact in fp32, so the two differ in the order of
summation only; on a GPU also in its precision, since Hopper's tensor cores add up with some 14 bits where `is_forward`
allows it, as Transformer Engine and torchao do too.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megalite.layers.fp8.quantise import Quantised
from megalite.layers.gemm import Gemm


class Product(Protocol):
    """A backend of FP8 products."""

    def __call__(self, left: Quantised, right: Quantised, out: torch.dtype, *, is_forward: bool) -> Tensor:
        """`left [m, k]` and `right [n, k]` -> `[m, n]` in the format `out`."""
        ...


def emulated(gemm: Gemm) -> Product:
    """Products in fp32 by a backend."""

    def multiply(left: Quantised, right: Quantised, out: torch.dtype, *, is_forward: bool) -> Tensor:
        if left.tile[1] is None and right.tile[1] is None:  # as the hardware does: scales leave the sum
            total = gemm.multiply(left.data.float(), right.data.float())
            return (total * (left.inverse * right.inverse.t())).to(out)
        return gemm.multiply(left.dequantise(), right.dequantise()).to(out)

    return multiply


def scaled_mm(left: Quantised, right: Quantised, out: torch.dtype, *, is_forward: bool) -> Tensor:
    """By `torch._scaled_mm`, which wants rows of the left and columns of the right contiguous.

    On a CPU every row gets the tensor's scale: the same bits, and the only way that is fast on all. With one scale
    torch 2.13 asks oneDNN where there is AMX, which without AMX's FP16 multiplies number by number, a thousand times as
    long.
    """
    of_left, of_right = left.inverse, right.inverse
    if left.data.device.type == "cpu":
        of_left, of_right = of_left.expand(left.data.shape[0], 1), of_right.expand(right.data.shape[0], 1)
    return torch._scaled_mm(
        left.data.contiguous(),
        right.data.contiguous().t(),
        of_left.contiguous(),
        of_right.contiguous().t(),
        out_dtype=out,
        use_fast_accum=is_forward,
    )
