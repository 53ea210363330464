"""Causal attention over a stream of packed documents.

The stream `[t, heads, head_dim]` holds documents end to end; `cu_seqlens` has their borders. A token sees the tokens
before it in its own document, at most `window` back. No `[t, t]` mask is ever built: on the CPU each document is a call
of its own (documents of equal length share one), a window is walked in blocks; on CUDA one variable-length kernel takes
the whole stream.

Legend: t tokens, n query heads, m key and value heads, d head_dim; all of the local tensor-parallel rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.layers.attention_blocks import attend_in_blocks
from megalite.layers.documents import ContextShare, Documents
from megalite.parallel.context import KeySpan
from megalite.parallel.random import kept_pairs

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

QUERIES_AT_ONCE = 256
"""Queries whose scores, or whose mask, exist at once."""
DROPPED_AT_ONCE = 64
"""The same where weights are dropped: the hash of one takes 8 bytes, and there are some at once."""
DROPPED_WEIGHTS = 2**24
"""No more at once: some 0.6 GB with scores and gradients."""

Attend = Callable[..., Tensor]
"""Of q, k, v, documents and window, and perhaps what each head has: sinks, seeds. Called as `attend_by_document` is."""
Kernel = Callable[..., Tensor]
"""Of torch's, over a stream of documents of any length; called as `attend_varlen` does."""


def choose_attention(device_type: str, dtype: torch.dtype) -> Attend:
    """The attention for a device and format: on a GPU variable-length kernels where there are any, else document by
    document; on a CPU blocks of queries."""
    if device_type == "cpu":
        return attend_in_blocks
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        try:
            from torch.nn.attention.varlen import varlen_attn  # torch >= 2.10
        except ImportError:
            return attend_by_document
        kernel = cast("Kernel", varlen_attn)  # a pair is returned only to those who ask for it
        return padded_values(partial(attend_varlen, _with_groups(kernel)))
    return attend_by_document


@torch.compiler.disable
def attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention with one kernel call a document.

    Args:
        q: `[t, n, d]`.
        k: `[t, m, d]`, n a multiple of m.
        v: `[t, m, v]`, v being d or not.
        documents: borders of the stream; of a context-parallel rank's share q has its own tokens, k and v all of them.
        window: tokens that a query sees, itself included; None for all before it.
        sinks: `[n]`, a score of each head that softmax counts besides; None for none.

    Returns:
        `[t, n, v]`.
    """
    if sinks is not None:
        return attend_spelled_out(PLAIN, q, k, v, documents, window, sinks)
    if documents.share is not None:
        return torch.cat([_attend_span(q, k, v, span, window) for span in documents.spans])
    lengths = documents.lengths
    if all(length == lengths[0] for length in lengths):
        batch = len(lengths)
        q, k, v = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
        return _attend_batch(q, k, v, window).flatten(0, 1)
    pieces = zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True)
    whole = [[x.unsqueeze(0) for x in piece] for piece in pieces]
    return torch.cat([_attend_batch(q, k, v, window).squeeze(0) for q, k, v in whole])


@dataclass(frozen=True)
class ScoreOptions:
    """What is done to scores that are spelled out."""

    soft_cap: float | None = None
    """They are bounded as `c tanh(s / c)` (Gemma 2)."""
    drop_rate: float = 0.0
    """Probability of dropping a weight, where heads have seeds."""


PLAIN = ScoreOptions()


@torch.compiler.disable
def attend_spelled_out(
    scores: ScoreOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window: int | None,
    sinks: Tensor | None = None,
    head_seeds: Tensor | None = None,
) -> Tensor:
    """Attention whose scores may be bounded, which may have sinks, and whose weights may be dropped; the other
    arguments are those of `attend_by_document`.

    No kernel of torch's has it, so scores are spelled out, for a block of queries at a time, and made again in the
    backward pass.

    Args:
        head_seeds: `[n]` int64, by which weights are dropped; None for none.
    """
    outputs, others = [], documents.keys if documents.share is None else documents.share.whole.keys
    for span in documents.spans:
        size = QUERIES_AT_ONCE
        if head_seeds is not None:
            size = max(1, min(DROPPED_AT_ONCE, DROPPED_WEIGHTS // (q.shape[1] * span.num_keys)))
        for queries, keys, seen in _blocks_of(span, size, window, q.device):
            drop = None
            if head_seeds is not None:
                drop = _Drop(documents.keys[queries], others[keys], head_seeds, scores.drop_rate)
            block = (q[queries], k[keys], v[keys], ~seen, sinks, drop)
            outputs.append(
                checkpoint(_spelled_out_block, scores.soft_cap, *block, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else _spelled_out_block(scores.soft_cap, *block)
            )
    return torch.cat(outputs)


@dataclass(frozen=True)
class _Drop:
    """Which weights of a block are dropped."""

    queries: Tensor
    """`[r]` int64, keys of the tokens."""
    keys: Tensor
    """`[c]` int64, the same."""
    head_seeds: Tensor
    rate: float

    def applied_to(self, weights: Tensor) -> Tensor:
        """`[m, g, r, c]`, in the order of the heads."""
        kept = kept_pairs(self.queries, self.keys, self.head_seeds, self.rate)
        return weights * kept.view(weights.shape) / (1.0 - self.rate)


def _spelled_out_block(
    soft_cap: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    sinks: Tensor | None,
    drop: _Drop | None,
) -> Tensor:
    """Queries `[r, n, d]` against keys and values `[c, m, d]`; softmax is at least fp32."""
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("rmgd,cmd->mgrc", q.unflatten(1, (-1, groups)), k) / q.shape[2] ** 0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.masked_fill(hidden, float("-inf")).to(wide)
    if sinks is not None:
        beside = sinks.to(wide).view(-1, groups, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat((scores, beside), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    weights = (weights if drop is None else drop.applied_to(weights)).to(v.dtype)
    return torch.einsum("mgrc,cmd->rmgd", weights, v).flatten(1, 2)


def attend_varlen(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None) -> Tensor:
    """Attention over the whole stream by torch's variable-length flash kernel, which a compiled block takes in as one
    op; the other arguments are those of `attend_by_document`."""
    if documents.are_whole_sequences and (window is None or window >= documents.max_seqlen):
        q, k, v = (x.unflatten(0, (-1, documents.max_seqlen)) for x in (q, k, v))
        return _attend_batch(q, k, v, None).flatten(0, 1)  # cuDNN's kernel, where it has one: half the time on a H200
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"window_size": (left, 0)}
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    if documents.share is None:
        borders, longest = documents.cu_seqlens, documents.max_seqlen
        return kernel(q, k, v, borders, borders, longest, longest, **options)
    return _attend_stretches(kernel, q, k, v, documents.share, options)


@torch.compiler.disable
def _attend_stretches(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, share: ContextShare, options: dict[str, Any]
) -> Tensor:
    """Queries that follow one another in the stream, as their keys do, by one call. Of the first document they are the
    last, and so aligned by the kernel's causal mask."""
    found = []
    for stretch in share.on_device:
        seen, longest = stretch.keys, (stretch.most_queries, stretch.most_keys)
        borders = stretch.of_queries, stretch.of_keys
        found.append(kernel(q[stretch.queries], k[seen], v[seen], *borders, *longest, **options))
    return torch.cat(found)


def takes_sinks(attend: Attend) -> bool:
    """Whether an attention takes them."""
    return attend in (attend_by_document, attend_in_blocks)


def padded_values(attend: Attend) -> Attend:
    """An attention that wants values as wide as queries, and gets them: narrower ones, with zeros behind them."""

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
        width = v.shape[2]
        if width == q.shape[2]:
            return attend(q, k, v, *others, **options)
        return attend(q, k, F.pad(v, (0, q.shape[2] - width)), *others, **options)[..., :width]

    return call


def _with_groups(kernel: Kernel) -> Kernel:
    """A kernel for fewer key and value heads than query heads, whatever torch's version makes of that: torch 2.13's
    wants to be told, 2.11's takes them unasked (tried on a H200: results and gradients are those of repeated heads),
    and 2.10's has not been tried."""
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return kernel
    return _unasked(kernel) if TORCH >= (2, 11) else _repeating(kernel)


def _unasked(kernel: Kernel) -> Kernel:
    """A kernel that takes groups and has no word for them."""

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        return kernel(q, k, v, *others, **options)

    return call


def _repeating(kernel: Kernel) -> Kernel:
    """A kernel that wants as many key and value heads as there are query heads, and gets them."""

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return kernel(q, k, v, *others, **options)

    return call


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of equally long documents, `[batch, length, heads, d]` each."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if window is None or window >= q.shape[2]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    else:
        out = _attend_window(q, k, v, window)
    return out.transpose(1, 2)


def _attend_span(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, window: int | None) -> Tensor:
    """The queries of a span, `[queries, n, d]`, against the keys that they see."""
    outputs = []
    for queries, keys, seen in _blocks_of(span, QUERIES_AT_ONCE, window, q.device):
        rows, columns, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[queries], k[keys], v[keys]))
        out = F.scaled_dot_product_attention(rows, columns, values, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _blocks_of(
    span: KeySpan, size: int, window: int | None, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The queries of a span in blocks of a size, the keys that they may see, and a mask `[queries, keys]` of those that
    they do."""
    before = span.num_keys - span.num_queries
    for start in range(0, span.num_queries, size):
        stop = min(start + size, span.num_queries)
        first_key = 0 if window is None else max(0, before + start - window + 1)
        rows = torch.arange(before + start, before + stop, device=device).unsqueeze(1)
        columns = torch.arange(first_key, before + stop, device=device)
        seen = columns <= rows if window is None else (columns <= rows) & (columns > rows - window)
        queries = slice(span.query + start, span.query + stop)
        yield queries, slice(span.key + first_key, span.key + before + stop), seen


def _attend_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding window in blocks of `window` queries, each against its own block and the one before it."""
    length = q.shape[2]
    outputs = []
    for start in range(0, length, window):
        stop, first_key = min(start + window, length), max(0, start - window + 1)
        rows = torch.arange(start, stop, device=q.device).unsqueeze(1)
        columns = torch.arange(first_key, stop, device=q.device)
        seen = (columns <= rows) & (columns > rows - window)
        keys, values = k[:, :, first_key:stop], v[:, :, first_key:stop]
        block = F.scaled_dot_product_attention(
            q[:, :, start:stop], keys, values, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(block)
    return torch.cat(outputs, dim=2)
