"""Products of FP8 matrices: by the tensor cores' own instruction, or by the same numbers in fp32.

    emulated    FP8 numbers widened to fp32 and multiplied there: any recipe on any device, to study it
    scaled_mm   torch's `_scaled_mm`: one scale a tensor or a row; on GPUs from Ada and Hopper on, and on CPUs too

Both take `[m, k]` and `[n, k]` and give `[m, n]`. FP8 products are exact in fp32, so the two differ in the order of
summation only; on a GPU also in its precision, since Hopper's tensor cores add up with some 14 bits where `is_forward`
allows it, as Transformer Engine and torchao do too.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from megalite.host import cpu_flags
from megalite.layers.fp8.quantise import Quantised
from megalite.layers.gemm import PLAIN, Gemm


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

    On a CPU torch widens the numbers to fp32, but where there is AMX it asks oneDNN, which multiplies number by number
    without AMX's FP16, a thousand times as long: there they are widened here.
    """
    if left.data.device.type == "cpu" and _library_is_slow():
        return _WIDENED(left, right, out, is_forward=is_forward)
    return torch._scaled_mm(
        left.data.contiguous(),
        right.data.contiguous().t(),
        left.inverse.contiguous(),
        right.inverse.contiguous().t(),
        out_dtype=out,
        use_fast_accum=is_forward,
    )


_WIDENED = emulated(PLAIN)


@functools.cache
def _library_is_slow() -> bool:
    """Whether this CPU has AMX without its FP16."""
    flags = cpu_flags()
    return "amx_int8" in flags and "amx_fp16" not in flags
