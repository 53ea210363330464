"""Kernels of the stand-in device that a CPU does not have, or whose demands on their arguments differ from a GPU's.

Written with torch's ops on host memory; `torch.ops.stand_in.host` is a device tensor as the host sees it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.stand_in.graphs import Graphs


def register_kernels(graphs: Graphs) -> torch.library.Library:
    """Register all kernels; they are there as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", graphs.recorded(_flash_forward), "CUDA")
    library.impl("_flash_attention_backward", graphs.recorded(_flash_backward), "CUDA")
    library.impl("mm.dtype_out", graphs.recorded(_mm_into), "CUDA")
    library.impl("addmm.dtype_out", graphs.recorded(_addmm_into), "CUDA")
    library.impl("_scaled_mm", graphs.recorded(_scaled_mm), "CUDA")
    library.impl("_grouped_mm", graphs.recorded(_grouped_mm), "CUDA")
    library.impl("_scaled_grouped_mm", graphs.recorded(_scaled_grouped_mm), "CUDA")
    return library


def _grouped_mm(x: Tensor, matrices: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """`[n, k]` by `[g, k, m]`, a matrix for each run of rows; or `[m, n]` by `[n, k]`, a matrix of each run."""
    assert x.dtype == matrices.dtype == torch.bfloat16, (x.dtype, matrices.dtype)
    assert offs.dtype == torch.int32
    for operand in (x, matrices):
        assert 1 in operand.stride()[-2:], "one of the last two dims must be contiguous"
        assert all(stride * operand.element_size() % 16 == 0 for stride in operand.stride() if stride > 1)
    left, right, ends = _host(x, matrices, offs)
    spans = list(itertools.pairwise([0, *ends.tolist()]))
    left, right = left.float(), right.float()
    if right.dim() == 3:
        made = torch.full(
            (left.shape[0], right.shape[2]), torch.nan
        )  # the kernel leaves rows behind the last run alone
        for group, span in enumerate(spans):
            made[slice(*span)] = left[slice(*span)] @ right[group]
    else:
        made = torch.stack([left[:, slice(*span)] @ right[slice(*span)] for span in spans])
    return _device(made.to(torch.bfloat16), x)


def _scaled_grouped_mm(
    rows: Tensor,
    matrices: Tensor,
    scale_rows: Tensor,
    scale_matrices: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`[n, k]` by `[g, k, m]` in e4m3, a scale a row of the one and a column of the others."""
    assert rows.dtype == matrices.dtype == torch.float8_e4m3fn
    assert scale_rows.dtype == scale_matrices.dtype == torch.float32
    assert offs.dtype == torch.int32
    assert out_dtype == torch.bfloat16
    assert rows.stride(1) == matrices.stride(1) == 1, "rows lie in rows, matrices in columns"
    assert rows.shape[1] % 16 == matrices.shape[2] % 16 == 0
    assert scale_rows.shape == rows.shape[:1]
    assert scale_matrices.shape == (matrices.shape[0], matrices.shape[2])
    assert scale_rows.stride(0) == scale_matrices.stride(1) == 1
    left, right, of_rows, of_matrices, ends = _host(rows, matrices, scale_rows, scale_matrices, offs)
    left, right = left.float() * of_rows.unsqueeze(1), right.float() * of_matrices.unsqueeze(1)
    made = torch.full((left.shape[0], right.shape[2]), torch.nan)
    for group, span in enumerate(itertools.pairwise([0, *ends.tolist()])):
        made[slice(*span)] = left[slice(*span)] @ right[group]
    return _device(made.to(torch.bfloat16), rows)


def _mm_into(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """A product of half-precision matrices that is not rounded."""
    assert left.dtype == right.dtype
    assert left.dtype in (torch.bfloat16, torch.float16), left.dtype
    assert out_dtype == out.dtype == torch.float32
    wide = [x.float() for x in _host(left, right)]
    return out.copy_(_device(wide[0] @ wide[1], left))


def _addmm_into(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    """The same, added to a sum in its place."""
    assert beta == alpha == 1
    assert total is out or total.data_ptr() == out.data_ptr()
    before = total.clone()
    return _mm_into(left, right, out_dtype, out=out).add_(before)


def _host(*tensors: Tensor) -> list[Tensor]:
    return [torch.ops.stand_in.host(x) for x in tensors]


def _device(x: Tensor, like: Tensor) -> Tensor:
    return torch.ops.stand_in.device(x, like)


def _documents(borders: Tensor, longest: int) -> list[tuple[int, int]]:
    """The documents between borders; the kernel visits no token beyond `longest` of any."""
    (host,) = _host(borders)
    spans = [(start, stop) for start, stop in itertools.pairwise(host.tolist()) if stop > start]
    assert borders.dtype == torch.int32, borders.dtype
    assert all(stop - start <= longest for start, stop in spans), "a document is longer than max_seqlen"
    return spans


def _probabilities(q: Tensor, k: Tensor, left: int) -> Tensor:
    """Causal softmax of one document: `[n, queries, d]` and `[n, keys, d]` -> `[n, queries, keys]`. Queries are its
    last tokens."""
    back = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    is_hidden = (back < 0) | (back > left) if left >= 0 else back < 0
    scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)


def _of_document(span: tuple[int, int], heads: int, *tensors: Tensor) -> list[Tensor]:
    """A document's part of `[t, n or m, d]` tensors, as fp32 `[n, length, d]`."""
    parts = (x[slice(*span)].float().transpose(0, 1) for x in tensors)
    return [x.repeat_interleave(heads // x.shape[0], dim=0) for x in parts]


def _check_flash(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.dtype in (torch.float16, torch.bfloat16), f"flash attention has no {q.dtype}"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dim must be contiguous"
    assert q.shape[-1] % 8 == 0, f"heads of {q.shape[-1]}"
    assert q.shape[-1] <= 256, f"heads of {q.shape[-1]}"


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders_q: Tensor,
    borders_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    _check_flash(q, k, v)
    assert causal or window_size_right == 0, "sees what comes later"
    assert dropout == 0.0
    assert scale is None
    assert all(value is None for value in others.values()), others
    spans = zip(_documents(borders_q, longest_q), _documents(borders_k, longest_k), strict=True)
    left = -1 if window_size_left is None else window_size_left
    pieces = []
    for queries, keys in spans:
        (query,) = _of_document(queries, q.shape[1], *_host(q))
        key, value = _of_document(keys, q.shape[1], *_host(k, v))
        pieces.append((_probabilities(query, key, left) @ value).transpose(0, 1))
    out = torch.cat(pieces).to(q.dtype)
    sums = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    unused = torch.zeros(2, dtype=torch.uint64)
    return tuple(_device(x, q) for x in (out, sums, unused, unused, torch.zeros(0)))


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    borders_q: Tensor,
    borders_k: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *state: Any,
    window_size_left: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_flash(q, k, v)
    num_documents = borders_q.shape[0] - 1
    assert num_documents <= q.shape[0], f"a scratch of {128 * num_documents} rows for {q.shape[0]} tokens"
    left = -1 if window_size_left is None else window_size_left
    found = [torch.zeros(x.shape) for x in (q, k, v)]
    for queries, keys in zip(_documents(borders_q, longest_q), _documents(borders_k, longest_k), strict=True):
        query, g = _of_document(queries, q.shape[1], *_host(q, grad))
        key, value = _of_document(keys, q.shape[1], *_host(k, v))
        p = _probabilities(query, key, left)
        dp = g @ value.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        parts = (ds @ key, ds.transpose(1, 2) @ query, p.transpose(1, 2) @ g)
        for total, span, part in zip(found, (queries, keys, keys), parts, strict=True):
            total[slice(*span)] = part.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(_device(x.to(q.dtype), q) for x in found)


def _scaled_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """cuBLASLt's demands: dims are multiples of 16, rows of the left and columns of the right contiguous."""
    assert left.stride(1) == 1, "the left matrix is not row-major"
    assert right.stride(0) == 1, "the right matrix is not column-major"
    assert left.shape[1] % 16 == 0, f"{tuple(left.shape)} x {tuple(right.shape)}"
    assert right.shape[1] % 16 == 0, f"{tuple(left.shape)} x {tuple(right.shape)}"
    e5m2 = torch.float8_e5m2
    assert not (left.dtype == right.dtype == e5m2), "no product of two e5m2 matrices"
    assert scale_left.dtype == scale_right.dtype == torch.float32
    wide = [x.float() * scale for x, scale in zip(_host(left, right), _host(scale_left, scale_right), strict=True)]
    return _device((wide[0] @ wide[1]).to(out_dtype or left.dtype), left)
