"""Causal attention on CPUs: a block of queries at a time, by products with all keys that it sees.

    S = q k^T / sqrt(d)     scores `[heads, rows, keys]`, in a buffer that every block uses again
    P = softmax(S)          in place
    o = P v

The backward pass makes S and P again:

    dP = do v^T             dS = P (dP - sum(dP P))
    dv += P^T do            dq = dS k / sqrt(d)           dk += dS^T q / sqrt(d)

Scores and their gradients are at least fp32. For documents of 128 to 512 tokens this takes 0.35 to 0.65 of the time of
torch's flash kernel for CPUs, whose pieces are small there; long and tiny documents are left to it, and on CPUs that
multiply tiles of bf16 (AMX) the forward pass of nearly all in that format.

A head's sink is one more score, of no value: P is then exp(S - z), z the log of a sum that has it too.

Queries are all tokens of a document, or, of a context-parallel rank, some that follow one another; their last key is
their own. Heads that share a key and value head are rows of one matrix: row r is token r // g, g being the heads that
share one. Tiny documents side by side are made as if they were one, with a mask that keeps them apart: what they cost
is the way to their products, not these.

Legend: t tokens, n query heads, m key and value heads, d head_dim, v the channels of a value, of
which latent attention has fewer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.host import cpu_flags
from megalite.layers.documents import Documents, spans_in
from megalite.layers.scores import BLOCK_ROWS, Scores, apart, by_head, unseen
from megalite.layers.span_runs import SpanRun, runs_of
from megalite.parallel.context import KeySpan


@dataclass(frozen=True)
class FlashFrom:
    """Tokens of a document without a window from which on torch's kernel is faster; in the backward pass from no fewer
    than in the forward pass, for it needs what the kernel found there."""

    forward: int
    backward: int

    def __post_init__(self) -> None:
        assert self.forward <= self.backward, "the backward pass needs what the kernel found"


FLASH_FROM = {
    torch.float32: FlashFrom(768, 768),
    torch.bfloat16: FlashFrom(2048, 2048),
    torch.float16: FlashFrom(2048, 2048),
}
"""By format."""
FLASH_FROM_BY_AMX = {torch.bfloat16: FlashFrom(64, 768)}
"""The same where the CPU multiplies tiles of bf16: torch's kernel makes scores by them, blocks make theirs in fp32."""
FEW_SCORES = 2**15
"""Where the way to so many small products takes longer than torch's kernel."""
JOINT = 2**23
"""Tiny documents are made as one up to so many multiplications of one product, of all heads."""
JOINT_BY_TORCH = 2**18
"""The same where torch's kernel makes few scores, which begins sooner."""

NO_WINDOW = -1
"""To an op, which takes numbers alone."""


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention within each document: q `[t, n, d]`, k `[t, m, d]`, v `[t, m, v]` -> `[t, n, v]`, n a multiple of
    m; the rest as `attention.attend_by_document` takes it. Of a share q has its own tokens, k and v all of them."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        # The compiler, or selective recomputation: whoever watches is to see one op
        limits = (NO_WINDOW if window is None else window, _few_scores())
        return _attention(q, k, v, sinks, documents.span_table, limits)[0]
    return _InBlocks.apply(q, k, v, sinks, _Cuts(documents.spans, window, _few_scores()))


@dataclass(frozen=True)
class _Cuts:
    """Who sees whom, and up to how many scores torch's kernel makes them."""

    spans: Sequence[KeySpan]
    window: int | None
    few: int

    def are_left_to_torch(self, run: SpanRun, q: Tensor, *, backward: bool = False) -> bool:
        """Whether torch's kernel, which wants as many keys as queries, is faster for documents of one length."""
        has_window = self.window is not None and self.window < run.num_keys and not run.lengths
        if run.num_queries < run.num_keys or has_window:
            return False
        has_few = q.dtype == torch.float32 and run.count * q.shape[1] * run.num_keys**2 <= self.few
        if has_few or run.lengths:
            return has_few
        found = _flash_from(q.dtype)
        return found is not None and run.num_keys >= (found.backward if backward else found.forward)

    def most_joint(self, q: Tensor) -> int:
        """Tokens that tiny documents together may have to be made as one."""
        limit = JOINT_BY_TORCH if self.few and q.dtype == torch.float32 else JOINT
        return min(BLOCK_ROWS, math.isqrt(limit // (q.shape[1] * q.shape[2])))

    def mask(self, run: SpanRun, q: Tensor) -> Tensor | None:
        """Added to scores of documents that are made as one, `[t, t]`; None for others, which are causal."""
        return unseen(run.lengths, self.window, 1, q.dtype, q.device) if run.lengths else None


class _InBlocks(torch.autograd.Function):
    """The same for those whom nobody watches: an op costs more than a small product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cuts: _Cuts) -> Tensor:
        out, log_z = _attend(q, k, v, sinks, cuts)
        ctx.save_for_backward(q, k, v, sinks, out, log_z)
        ctx.cuts = cuts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, log_z = ctx.saved_tensors
        found = _gradients(grad, [q, k, v, out, log_z], ctx.cuts, has_sinks=sinks is not None)
        return *found, _gradient_of_sinks(grad, sinks, out, log_z), None


@torch.library.custom_op("megalite::attention_in_blocks", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, table: Tensor, limits: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, sinks, _cuts(table, limits))


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, table: Tensor, limits: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return _empty_result(q, v), _empty_log_z(q)


@torch.library.custom_op("megalite::attention_in_blocks_gradients", mutates_args=())
def _attention_gradients(
    grad: Tensor, kept: Sequence[Tensor], table: Tensor, limits: Sequence[int], has_sinks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad, kept, _cuts(table, limits), has_sinks=has_sinks)


@_attention_gradients.register_fake
def _(
    grad: Tensor, kept: Sequence[Tensor], table: Tensor, limits: Sequence[int], has_sinks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = kept
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, table, ctx.limits = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, table)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, log_z, table = ctx.saved_tensors
    found = _attention_gradients(grad, [q, k, v, out, log_z], table, ctx.limits, sinks is not None)
    return *found, _gradient_of_sinks(grad, sinks, out, log_z), None, None


_attention.register_autograd(_backward, setup_context=_keep)


def _cuts(table: Tensor, limits: Sequence[int]) -> _Cuts:
    """As an op is told of them: `limits` are the window and the scores that are few."""
    window, few = limits
    return _Cuts(spans_in(table), None if window == NO_WINDOW else window, few)


def _empty_result(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty((*q.shape[:2], v.shape[2]))


def _empty_log_z(q: Tensor) -> Tensor:
    """Room for log(sum of exponentials) of each query's scores, `[t, n]`, which is set for documents that torch's
    kernel made, and where there are sinks."""
    return q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


def _flash_from(dtype: torch.dtype) -> FlashFrom | None:
    """None for a format in which blocks are always faster."""
    return FLASH_FROM_BY_AMX.get(dtype, FLASH_FROM.get(dtype)) if _has_amx() else FLASH_FROM.get(dtype)


@functools.cache
def _has_amx() -> bool:
    """Whether the CPU multiplies tiles of bf16."""
    return "amx_bf16" in cpu_flags()


@torch.compiler.assume_constant_result
def _few_scores() -> int:
    """Up to how many scores documents are left to torch's kernel in fp32: none where oneDNN multiplies, whose products
    begin late, and the kernel makes many tiny ones."""
    return 0 if torch.get_float32_matmul_precision() == "medium" else FEW_SCORES


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cuts: _Cuts) -> tuple[Tensor, Tensor]:
    out, log_z = _empty_result(q, v), _empty_log_z(q)
    for run in runs_of(cuts.spans, cuts.most_joint(q)):
        tokens, seen = run.queries, run.keys
        if cuts.are_left_to_torch(run, q):
            mask = cuts.mask(run, q)
            _attend_by_torch(out[tokens], log_z[tokens], q[tokens], k[seen], v[seen], run.count, mask)
            if sinks is not None:
                _give_to_sinks(out[tokens], log_z[tokens], sinks)
            continue
        scores = Scores(q[tokens], k[seen], run.count, cuts.window, lengths=run.lengths)
        values = by_head(v[seen], run.count, v.shape[1])
        mixed = values.new_empty((*scores.queries.shape[:2], v.shape[2]))
        z = None if sinks is None else _of_queries(sinks.to(log_z), q[tokens], run.count, k.shape[1])
        for heads, rows, keys in scores.blocks():
            weights = scores.softmax(heads, rows, keys) if z is None else scores.beside(z, heads, rows, keys)
            mixed[heads, rows] = torch.bmm(weights.to(v.dtype), values[heads, keys])
        _put(out[tokens], mixed, run.count)
        if z is not None:
            _put(log_z[tokens].unsqueeze(-1), z, run.count)
    return out, log_z


def _of_queries(sinks: Tensor, q: Tensor, count: int, num_groups: int) -> Tensor:
    """Sinks `[n]` for every query, as rows of scores stand: `[count x m, length x g, 1]`, to be written to."""
    return by_head(sinks.expand(q.shape[0], -1).unsqueeze(-1), count, num_groups).clone()


def _give_to_sinks(out: Tensor, log_z: Tensor, sinks: Tensor) -> None:
    """Make results `[t, n, v]` and sums `[t, n]` those of a softmax that counts sinks `[n]` too, in place."""
    both = torch.logaddexp(log_z, sinks.to(log_z))
    out.mul_((log_z - both).exp_().unsqueeze(-1))
    log_z.copy_(both)


def _gradient_of_sinks(grad: Tensor, sinks: Tensor | None, out: Tensor, log_z: Tensor) -> Tensor | None:
    """`[n]`: what sinks took of each query, times what more of it would have done to the loss."""
    if sinks is None:
        return None
    shares = (sinks.to(log_z) - log_z).exp()
    return -(shares * (grad.to(log_z) * out).sum(-1)).sum(0).to(sinks.dtype)


def _gradients(grad: Tensor, kept: Sequence[Tensor], cuts: _Cuts, *, has_sinks: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, log_z = kept
    is_whole = q.shape[0] == k.shape[0]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not is_whole:  # keys are seen from several spans
        dk, dv = (x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (dk, dv))
    for run in runs_of(cuts.spans, cuts.most_joint(q)):
        tokens, seen, count = run.queries, run.keys, run.count
        if cuts.are_left_to_torch(run, q, backward=True):
            parts = [q[tokens], k[seen], v[seen], out[tokens], log_z[tokens]]
            _gradients_by_torch((dq[tokens], dk[seen], dv[seen]), grad[tokens], parts, count, cuts.mask(run, q))
            continue
        scores = Scores(q[tokens], k[seen], count, cuts.window, lengths=run.lengths)
        keys_here, values = (by_head(x[seen], count, k.shape[1]) for x in (k, v))
        grads = by_head(grad[tokens], count, k.shape[1])
        queries = scores.queries.to(k.dtype)
        wide_values, wide_grads = values.to(scores.dtype).transpose(1, 2), grads.to(scores.dtype)
        of_queries = torch.empty_like(scores.queries)
        of_keys, of_values = (torch.zeros_like(x, dtype=scores.dtype) for x in (keys_here, values))
        z = by_head(log_z[tokens].unsqueeze(-1), count, k.shape[1]) if has_sinks else None
        for heads, rows, keys in scores.blocks():
            weights = scores.softmax(heads, rows, keys) if z is None else scores.shares(z, heads, rows, keys)
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


def _attend_by_torch(
    out: Tensor, log_z: Tensor, q: Tensor, k: Tensor, v: Tensor, count: int, mask: Tensor | None
) -> None:
    """Fill `out` and `log_z` of documents of one length by torch's kernel, which wants as many keys as queries, and
    values as wide."""
    found, found_log_z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_headsapart(q, k, _as_wide(v, q), count=count), is_causal=mask is None, attn_mask=mask
    )
    out.unflatten(0, (count, -1)).copy_(found.transpose(1, 2)[..., : out.shape[2]])
    log_z.unflatten(0, (count, -1)).copy_(found_log_z.transpose(1, 2))


def _gradients_by_torch(
    into: tuple[Tensor, Tensor, Tensor], grad: Tensor, kept: Sequence[Tensor], count: int, mask: Tensor | None
) -> None:
    """Fill dq, dk and dv, given q, k, v, the output and `log_z`."""
    q, k, v, out, log_z = kept
    grad_by_head, out_by_head = _headsapart(_as_wide(grad, q), _as_wide(out, q), count=count)
    queries, keys, values = _headsapart(q, k, _as_wide(v, q), count=count)
    log_z_by_head = log_z.unflatten(0, (count, -1)).transpose(1, 2).contiguous()
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_by_head, queries, keys, values, out_by_head, log_z_by_head, 0.0, mask is None, attn_mask=mask
    )
    for target, each in zip(into, found, strict=True):
        apart = target.unflatten(0, (count, -1)).transpose(1, 2)
        each = each[..., : target.shape[2]]
        apart.copy_(each.unflatten(1, (target.shape[1], -1)).sum(2) if each.shape != apart.shape else each)


def _as_wide(x: Tensor, as_: Tensor) -> Tensor:
    """Heads with zeros behind their channels, so that they have as many as others."""
    return x if x.shape[2] == as_.shape[2] else F.pad(x, (0, as_.shape[2] - x.shape[2]))


def _headsapart(first: Tensor, *others: Tensor, count: int) -> list[Tensor]:
    """`[count x length, m, d]` -> `[count, n, length, d]`, heads repeated to as many as the first has."""
    groups = [first.shape[1] // x.shape[1] for x in others]
    repeated = [x if n == 1 else x.repeat_interleave(n, dim=1) for x, n in zip(others, groups, strict=True)]
    return [x.unflatten(0, (count, -1)).transpose(1, 2) for x in (first, *repeated)]


def _put(out: Tensor, x: Tensor, count: int) -> None:
    """`_by_head` undone, into `[count x length, n, d]`."""
    places = apart(out, count, x.shape[0] // count)
    places.copy_(x.view(places.shape))


def _add(total: Tensor, x: Tensor, count: int) -> None:
    """The same, added to what is there."""
    places = apart(total, count, x.shape[0] // count)
    places += x.view(places.shape)
