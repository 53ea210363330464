"""Causal attention on CPUs: a block of queries at a time, by products with all keys that it sees.

    S = q k^T / sqrt(d)     scores `[heads, rows, keys]`, in a buffer that every block uses again
    P = softmax(S)          in place
    o = P v

The backward pass makes S and P again:

    dP = do v^T             dS = P (dP - sum(dP P))
    dv += P^T do            dq = dS k / sqrt(d)           dk += dS^T q / sqrt(d)

Scores and their gradients are at least fp32. For documents of 128 to 512 tokens this takes 0.35 to 0.65 of the time of
torch's flash kernel for CPUs, whose pieces are small there; long and tiny documents are left to it.

Queries are all tokens of a document, or, of a context-parallel rank, some that follow one another; their last key is
their own. Heads that share a key and value head are rows of one matrix: row r is token r // g, g being the heads that
share one.

Legend: t tokens, n query heads, m key and value heads, d head_dim, v the channels of a value, of
which latent attention has fewer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.layers.documents import Documents, spans_in
from megalite.parallel.context import KeySpan

BLOCK_ROWS = 128
"""Rows of a head that are multiplied at once: half of a causal block on the diagonal is made for nothing."""
BLOCK_TOKENS = 16
"""At least so many tokens are, however many heads share a key."""
BLOCK_SCORES = 2**20
"""Scores that exist at once, unless one head has more: 4 MB."""

FLASH_FROM = {torch.float32: 768, torch.bfloat16: 2048, torch.float16: 2048}
"""Tokens of a document without a window from which on torch's kernel is faster, by format."""
FEW_SCORES = 2**15
"""Where the way to so many small products takes longer than torch's kernel."""

NO_WINDOW = -1
"""To an op, which takes numbers alone."""


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None) -> Tensor:
    """Attention within each document: q `[t, n, d]`, k `[t, m, d]`, v `[t, m, v]` -> `[t, n, v]`, n a multiple of
    m; the rest as `attention.attend_by_document` takes it. Of a share q has its own tokens, k and v all of them."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        # The compiler, or selective recomputation: whoever watches is to see one op
        limits = (NO_WINDOW if window is None else window, _few_scores())
        return _attention(q, k, v, documents.span_table, limits)[0]
    return _InBlocks.apply(q, k, v, _Cuts(documents.spans, window, _few_scores()))


@dataclass(frozen=True)
class _Cuts:
    """Who sees whom, and up to how many scores torch's kernel makes them."""

    spans: Sequence[KeySpan]
    window: int | None
    few: int

    def are_left_to_torch(self, run: _SpanRun, q: Tensor) -> bool:
        """Whether torch's kernel, which wants as many keys as queries, is faster for documents of one length."""
        if run.num_queries < run.num_keys or (self.window is not None and self.window < run.num_keys):
            return False
        has_few = q.dtype == torch.float32 and run.count * q.shape[1] * run.num_keys**2 <= self.few
        return has_few or run.num_keys >= FLASH_FROM.get(q.dtype, run.num_keys + 1)


@dataclass(frozen=True)
class _SpanRun:
    """Spans of one size that stand side by side: whole documents, or one that is not."""

    queries: slice
    """Of the rank's own tokens."""
    keys: slice
    """Of the whole stream."""
    num_queries: int
    """Of each."""
    num_keys: int
    count: int


class _InBlocks(torch.autograd.Function):
    """The same for those whom nobody watches: an op costs more than a small product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cuts: _Cuts) -> Tensor:
        out, log_z = _attend(q, k, v, cuts)
        ctx.save_for_backward(q, k, v, out, log_z)
        ctx.cuts = cuts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_z = ctx.saved_tensors
        return *_gradients(grad, q, k, v, out, log_z, ctx.cuts), None


@torch.library.custom_op("megalite::attention_in_blocks", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, _cuts(table, limits))


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
    return _empty_result(q, v), _empty_log_z(q)


@torch.library.custom_op("megalite::attention_in_blocks_gradients", mutates_args=())
def _attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_z: Tensor, table: Tensor, limits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad, q, k, v, out, log_z, _cuts(table, limits))


@_attention_gradients.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_z: Tensor, table: Tensor, limits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, table, ctx.limits = inputs
    ctx.save_for_backward(*tensors, *output, table)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_gradients(grad, *ctx.saved_tensors, ctx.limits), None, None


_attention.register_autograd(_backward, setup_context=_keep)


def _cuts(table: Tensor, limits: Sequence[int]) -> _Cuts:
    """As an op is told of them: `limits` are the window and the scores that are few."""
    window, few = limits
    return _Cuts(spans_in(table), None if window == NO_WINDOW else window, few)


def _empty_result(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty((*q.shape[:2], v.shape[2]))


def _empty_log_z(q: Tensor) -> Tensor:
    """Room for log(sum of exponentials) of each query's scores, `[t, n]`, which is set for long documents alone."""
    return q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.compiler.assume_constant_result
def _few_scores() -> int:
    """Up to how many scores documents are left to torch's kernel in fp32: none where oneDNN multiplies, whose products
    begin late, and the kernel makes many tiny ones."""
    return 0 if torch.get_float32_matmul_precision() == "medium" else FEW_SCORES


def _attend(q: Tensor, k: Tensor, v: Tensor, cuts: _Cuts) -> tuple[Tensor, Tensor]:
    out, log_z = _empty_result(q, v), _empty_log_z(q)
    for run in _runs(cuts.spans):
        tokens, seen = run.queries, run.keys
        if cuts.are_left_to_torch(run, q):
            _attend_by_torch(out[tokens], log_z[tokens], q[tokens], k[seen], v[seen], run.count)
            continue
        scores = Scores(q[tokens], k[seen], run.count, cuts.window)
        values = by_head(v[seen], run.count, v.shape[1])
        mixed = values.new_empty((*scores.queries.shape[:2], v.shape[2]))
        for heads, rows, keys in scores.blocks():
            weights = scores.softmax(heads, rows, keys).to(v.dtype)
            mixed[heads, rows] = torch.bmm(weights, values[heads, keys])
        _put(out[tokens], mixed, run.count)
    return out, log_z


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_z: Tensor, cuts: _Cuts
) -> tuple[Tensor, Tensor, Tensor]:
    is_whole = q.shape[0] == k.shape[0]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not is_whole:  # keys are seen from several spans
        dk, dv = (x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (dk, dv))
    for run in _runs(cuts.spans):
        tokens, seen, count = run.queries, run.keys, run.count
        if cuts.are_left_to_torch(run, q):
            kept = [q[tokens], k[seen], v[seen], out[tokens], log_z[tokens]]
            _gradients_by_torch((dq[tokens], dk[seen], dv[seen]), grad[tokens], kept, count)
            continue
        scores = Scores(q[tokens], k[seen], count, cuts.window)
        keys_here, values = (by_head(x[seen], count, k.shape[1]) for x in (k, v))
        grads = by_head(grad[tokens], count, k.shape[1])
        queries = scores.queries.to(k.dtype)
        wide_values, wide_grads = values.to(scores.dtype).transpose(1, 2), grads.to(scores.dtype)
        of_queries = torch.empty_like(scores.queries)
        of_keys, of_values = (torch.zeros_like(x, dtype=scores.dtype) for x in (keys_here, values))
        for heads, rows, keys in scores.blocks():
            weights = scores.softmax(heads, rows, keys)
            slopes = scores.slopes(weights, wide_grads[heads, rows], wide_values[heads, :, keys]).to(k.dtype)
            weights = weights.to(v.dtype)
            of_queries[heads, rows] = torch.bmm(slopes, keys_here[heads, keys])
            of_keys[heads, keys] += torch.bmm(slopes.transpose(1, 2), queries[heads, rows])
            of_values[heads, keys] += torch.bmm(weights.transpose(1, 2), grads[heads, rows])
        _put(dq[tokens], of_queries.mul_(scores.scale), count)
        put = _put if is_whole else _add
        put(dk[seen], of_keys, count)
        put(dv[seen], of_values, count)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _attend_by_torch(out: Tensor, log_z: Tensor, q: Tensor, k: Tensor, v: Tensor, count: int) -> None:
    """Fill `out` and `log_z` of documents of one length by torch's kernel, which wants as many keys as queries, and
    values as wide."""
    found, found_log_z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_apart(q, k, _as_wide(v, q), count=count), is_causal=True
    )
    out.unflatten(0, (count, -1)).copy_(found.transpose(1, 2)[..., : out.shape[2]])
    log_z.unflatten(0, (count, -1)).copy_(found_log_z.transpose(1, 2))


def _gradients_by_torch(into: tuple[Tensor, Tensor, Tensor], grad: Tensor, kept: Sequence[Tensor], count: int) -> None:
    """Fill dq, dk and dv, given q, k, v, the output and `log_z`."""
    q, k, v, out, log_z = kept
    grad_by_head, out_by_head = _heads_apart(_as_wide(grad, q), _as_wide(out, q), count=count)
    queries, keys, values = _heads_apart(q, k, _as_wide(v, q), count=count)
    log_z_by_head = log_z.unflatten(0, (count, -1)).transpose(1, 2).contiguous()
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_by_head, queries, keys, values, out_by_head, log_z_by_head, 0.0, True
    )
    for target, each in zip(into, found, strict=True):
        apart = target.unflatten(0, (count, -1)).transpose(1, 2)
        each = each[..., : target.shape[2]]
        apart.copy_(each.unflatten(1, (target.shape[1], -1)).sum(2) if each.shape != apart.shape else each)


def _as_wide(x: Tensor, as_: Tensor) -> Tensor:
    """Heads with zeros behind their channels, so that they have as many as others."""
    return x if x.shape[2] == as_.shape[2] else F.pad(x, (0, as_.shape[2] - x.shape[2]))


def _heads_apart(first: Tensor, *others: Tensor, count: int) -> list[Tensor]:
    """`[count x length, m, d]` -> `[count, n, length, d]`, heads repeated to as many as the first has."""
    groups = [first.shape[1] // x.shape[1] for x in others]
    repeated = [x if n == 1 else x.repeat_interleave(n, dim=1) for x, n in zip(others, groups, strict=True)]
    return [x.unflatten(0, (count, -1)).transpose(1, 2) for x in (first, *repeated)]


class Scores:
    """Scores of documents of one length, block by block.

    Args:
        q: `[count x queries, n, d]`, the last tokens of each document.
        k: `[count x length, m, d]`.
        before: tokens between the first key and the first query of each; None where their last ones are the same.
    """

    def __init__(self, q: Tensor, k: Tensor, count: int, window: int | None, before: int | None = None):
        self.num_queries, self.length, self.window = q.shape[0] // count, k.shape[0] // count, window
        self._before = self.length - self.num_queries if before is None else before
        self.groups = q.shape[1] // k.shape[1]
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.scale = q.shape[2] ** -0.5
        self.queries = by_head(q, count, k.shape[1]).to(self.dtype) * self.scale
        """`[count x m, length x g, d]`, scaled."""
        self._keys = by_head(k, count, k.shape[1]).to(self.dtype).transpose(1, 2)
        self._block_tokens = max(BLOCK_TOKENS, BLOCK_ROWS // self.groups)
        widest = self.length if window is None else min(self.length, window - 1 + self._block_tokens)
        self._size = min(self._block_tokens, self.num_queries) * self.groups * widest
        self._num_heads = max(1, min(self.queries.shape[0], BLOCK_SCORES // self._size))
        self._buffers: dict[str, Tensor] = {}

    def blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Heads, rows and keys of each block."""
        for head in range(0, self.queries.shape[0], self._num_heads):
            for start in range(0, self.num_queries, self._block_tokens):
                stop = min(start + self._block_tokens, self.num_queries)
                first_key = 0 if self.window is None else max(0, self._before + start - self.window + 1)
                rows = slice(start * self.groups, stop * self.groups)
                keys = slice(first_key, min(self._before + stop, self.length))
                if keys.start >= keys.stop:
                    continue  # outside of the window
                yield slice(head, min(head + self._num_heads, self.queries.shape[0])), rows, keys

    def softmax(self, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Weights of a block, `[heads, rows, keys]`, until the next block's."""
        scores = self.of_block(heads, rows, keys)
        return torch.softmax(scores, -1, out=scores)

    def of_block(self, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Scores of a block, `[heads, rows, keys]`, -inf for what is not seen, until the next block's."""
        left, right = self.queries[heads, rows], self._keys[heads, :, keys]
        scores = torch.bmm(left, right, out=self._buffer("scores", left, right))
        num_tokens = scores.shape[1] // self.groups
        num_before = self._before + rows.start // self.groups - keys.start
        num_keys = scores.shape[2]
        if num_before < num_keys:
            scores[:, :, num_before:] += _later(num_tokens, self.groups, self.dtype, scores.device)[
                :, : num_keys - num_before
            ]
        if self.window is not None and (spare := self.window - 1 - num_before) < num_tokens:
            scores[:, :, :num_tokens] += _too_early(num_tokens, spare, self.groups, self.dtype, scores.device)[
                :, :num_keys
            ]
        return scores

    def slopes(self, weights: Tensor, grads: Tensor, values: Tensor) -> Tensor:
        """Gradients of a block's scores, `[heads, rows, keys]`, until the next block's; `values` is transposed."""
        slopes = torch.bmm(grads, values, out=self._buffer("slopes", grads, values))
        return torch._softmax_backward_data(slopes, weights, -1, self.dtype, grad_input=slopes)

    def _buffer(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Memory for a product."""
        if name not in self._buffers:
            self._buffers[name] = left.new_empty(self._num_heads * self._size)
        shape = (left.shape[0], left.shape[1], right.shape[2])
        return self._buffers[name][: shape[0] * shape[1] * shape[2]].view(shape)


@functools.lru_cache(maxsize=64)
def _later(num_tokens: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Added to scores of a block's own keys, `[num_tokens x groups, num_tokens]`: -inf where they are later."""
    hidden = torch.full((num_tokens, num_tokens), float("-inf"), dtype=dtype, device=device).triu_(1)
    return hidden.repeat_interleave(groups, dim=0)


@functools.lru_cache(maxsize=64)
def _too_early(num_tokens: int, spare: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Added to scores of a block's first keys, `[num_tokens x groups, num_tokens]`: -inf where they lie outside the
    window, in which the block's first token could see so many more."""
    hidden = torch.full((num_tokens, num_tokens), float("-inf"), dtype=dtype, device=device).tril_(-1 - spare)
    return hidden.repeat_interleave(groups, dim=0)


def _runs(spans: Sequence[KeySpan]) -> Iterator[_SpanRun]:
    """Spans of one size that stand side by side, taken together."""
    for _, same in itertools.groupby(spans, _Grouped()):
        first, *others = same
        count = 1 + len(others)
        queries = slice(first.query, first.query + count * first.num_queries)
        keys = slice(first.key, first.key + count * first.num_keys)
        yield _SpanRun(queries, keys, first.num_queries, first.num_keys, count)


class _Grouped:
    """The number of a span's run: whole documents of one length that follow one another are in one."""

    def __init__(self) -> None:
        self._former: KeySpan | None = None
        self._number = 0

    def __call__(self, span: KeySpan) -> int:
        former, self._former = self._former, span
        is_whole = span.num_queries == span.num_keys
        follows = former is not None and former[1::2] == span[1::2] and former.key + former.num_keys == span.key
        self._number += not (is_whole and follows)
        return self._number


def _apart(x: Tensor, count: int, num_groups: int) -> Tensor:
    """`[count x length, n, d]` -> a view `[count, num_groups, length, n / num_groups, d]`."""
    return x.unflatten(1, (num_groups, -1)).unflatten(0, (count, -1)).transpose(1, 2)


def by_head(x: Tensor, count: int, num_groups: int) -> Tensor:
    """`[count x length, n, d]` -> `[count x num_groups, length x n / num_groups, d]`."""
    return _apart(x, count, num_groups).reshape(count * num_groups, -1, x.shape[2])


def _put(out: Tensor, x: Tensor, count: int) -> None:
    """`_by_head` undone, into `[count x length, n, d]`."""
    apart = _apart(out, count, x.shape[0] // count)
    apart.copy_(x.view(apart.shape))


def _add(total: Tensor, x: Tensor, count: int) -> None:
    """The same, added to what is there."""
    apart = _apart(total, count, x.shape[0] // count)
    apart += x.view(apart.shape)
