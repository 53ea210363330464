"""Kernels in Triton, which comes with torch for GPUs and is not there without. Imported where one is launched."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""That one program works on, or at a time."""
TURNED_PAIRS = 1024
"""Of channels, that one program rotates."""
WIDE_COLUMNS = 4096
"""The same where a program passes over a row of logits."""


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


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    square = x * x  # a series where the exponential's difference from 1 has no digits left
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.25, near, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def _row_softmax(logits, labels, out, width, stride, soft_cap, is_bounded: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one row: `logits [v]` -> `out [3, c]`. Each lane keeps a maximum and a sum of its own until the end."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    maxima = tl.full((columns,), -3.0e38, tl.float32)
    totals = tl.zeros((columns,), tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        logit = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
        if is_bounded:
            logit = tl.where(column < width, soft_cap * _tanh(logit / soft_cap), float("-inf"))
        larger = tl.maximum(maxima, logit)
        totals = totals * tl.exp(maxima - larger) + tl.exp(logit - larger)
        maxima = larger
    maximum = tl.max(maxima, axis=0)
    label = tl.load(labels + row)
    is_here = (label >= 0) & (label < width)
    target = tl.load(logits + row * stride + label, mask=is_here, other=0.0).to(tl.float32)
    if is_bounded:
        target = soft_cap * _tanh(target / soft_cap)
    tl.store(out + row, maximum)
    tl.store(out + rows + row, tl.sum(totals * tl.exp(maxima - maximum), axis=0))
    tl.store(out + 2 * rows + row, target - maximum)


@triton.jit
def _logits_gradient(  # type: ignore[no-untyped-def]
    logits, labels, maxima, scales, weights, width, stride, soft_cap, is_bounded: tl.constexpr, columns: tl.constexpr
):
    """Of one row, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_there = column < width
    logit = tl.load(logits + row * stride + column, mask=is_there, other=0.0).to(tl.float32)
    tanh = logit
    if is_bounded:
        tanh = _tanh(logit / soft_cap)
        logit = soft_cap * tanh
    grad = tl.exp(logit - tl.load(maxima + row)) * tl.load(scales + row)
    grad = tl.where(column == tl.load(labels + row), grad - tl.load(weights + row), grad)
    if is_bounded:
        grad = grad * (1.0 - tanh * tanh)
    tl.store(logits + row * stride + column, grad.to(logits.dtype.element_ty), mask=is_there)


def launch_row_softmax(logits: Tensor, labels: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, total and target of `layers.logits.OwnColumns`, fp32, of logits `[c, v]`."""
    num_rows, width = logits.shape
    out = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        bound = 1.0 if soft_cap is None else soft_cap
        _row_softmax[(num_rows,)](
            logits, labels, out, width, logits.stride(0), bound, is_bounded=soft_cap is not None, columns=WIDE_COLUMNS
        )
    maximum, total, target = out.unbind()
    return maximum, total, target


def launch_logits_gradient(
    logits: Tensor, labels: Tensor, rows: tuple[Tensor, Tensor, Tensor], soft_cap: float | None
) -> None:
    """See `layers.logits.Columns.put_gradient`.

    Args:
        rows: maximum, scale and weight of each, fp32.
    """
    num_rows, width = logits.shape
    if num_rows:
        bound = 1.0 if soft_cap is None else soft_cap
        _logits_gradient[(num_rows, triton.cdiv(width, COLUMNS))](
            logits, labels, *rows, width, logits.stride(0), bound, is_bounded=soft_cap is not None, columns=COLUMNS
        )


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, x_row, x_head, out, out_row, cos, sin, direction, num_heads, half, is_turned: tl.constexpr,
    heads: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, rotated by its angles or against them: `x` and `out [any, 2 half]`, the heads of `out`
    end to end."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * heads + tl.arange(0, heads)[:, None]).to(tl.int64)
    pair = tl.arange(0, pairs)[None, :]
    is_there = (head < num_heads) & (pair < half)
    source, target = x + (token * x_row + head * x_head + pair), out + (token * out_row + head * 2 * half + pair)
    first = tl.load(source, mask=is_there).to(tl.float32)
    second = tl.load(source + half, mask=is_there).to(tl.float32)
    if is_turned:
        c = tl.load(cos + token * half + pair, mask=pair < half)
        s = tl.load(sin + token * half + pair, mask=pair < half) * direction
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    tl.store(target, first.to(out.dtype.element_ty), mask=is_there)
    tl.store(target + half, second.to(out.dtype.element_ty), mask=is_there)


def launch_turn_apart(heads: Tensor, cos: Tensor, sin: Tensor, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `layers.turn.turn_apart`."""
    tokens, num, width = heads.shape
    num_kv = (num - num_queries) // 2
    q, k, v = (heads.new_empty(tokens, each, width) for each in (num_queries, num_kv, num_kv))
    parts = heads.split((num_queries, num_kv, num_kv), dim=1)
    for x, out, is_turned in zip(parts, (q, k, v), (True, True, False), strict=True):
        _launch_turn(x, out, cos, sin, 1.0, is_turned=is_turned)
    return q, k, v


def launch_turn_together(grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """See `layers.turn.turn_together`."""
    counts = [each.shape[1] for each in grads]
    whole = grads[0].new_empty(grads[0].shape[0], sum(counts), grads[0].shape[2])
    for x, out, is_turned in zip(grads, whole.split(counts, dim=1), (True, True, False), strict=True):
        _launch_turn(x, out, cos, sin, -1.0, is_turned=is_turned)
    return whole


def _launch_turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, direction: float, *, is_turned: bool) -> None:
    tokens, num_heads, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    half = width // 2
    pairs = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, TURNED_PAIRS // pairs))
    if tokens:
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = x.stride(0), x.stride(1), out, out.stride(0)
        _turn[(tokens, triton.cdiv(num_heads, heads))](
            x, *strides, cos, sin, direction, num_heads, half, is_turned=is_turned, heads=heads, pairs=pairs
        )
