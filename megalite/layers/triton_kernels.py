"""Kernels in Triton, which comes with torch for GPUs and is not there without. Imported where one is launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""That one program works on."""


@triton.jit
def _swiglu_gradient(grad, x, out, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
    """Of one row: `grad [f]` and `x [2f]` -> `out [2f]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_there = column < width
    gate = tl.load(x + row * 2 * width + column, mask=is_there).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=is_there).to(tl.float32)
    back = tl.load(grad + row * width + column, mask=is_there).to(tl.float32)
    share = tl.sigmoid(gate)
    passed = gate * share
    of_gate, of_up = back * up * (share + passed * (1 - share)), back * passed
    tl.store(out + row * 2 * width + column, of_gate.to(out.dtype.element_ty), mask=is_there)
    tl.store(out + row * 2 * width + width + column, of_up.to(out.dtype.element_ty), mask=is_there)


def launch_swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See `layers.swiglu.swiglu_gradient`."""
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    width = grad.shape[1]
    if x.shape[0]:
        _swiglu_gradient[(x.shape[0], triton.cdiv(width, COLUMNS))](grad, x, out, width, columns=COLUMNS)
    return out
