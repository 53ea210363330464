"""Ring attention (Liu et al. 2023): keys and values go round the context-parallel ranks, and each rank adds up what its
queries see of every piece.

    of piece i          S_i = q k_i^T / sqrt(d)     z_i = log sum exp S_i       o_i = softmax(S_i) v_i
    of all              z = log sum exp z_i         o = sum exp(z_i - z) o_i

In the backward pass z and o are known, so that pieces do not depend on each other. The gradients of a piece go round
with it, and are at home after the last step:

    P_i = exp(S_i - z)      dv_i += P_i^T do
    dS_i = P_i (do v_i^T - sum(do o))       dq += dS_i k_i / sqrt(d)        dk_i += dS_i^T q / sqrt(d)

Sums are fp32 at least. No rank has more than two pieces at once. Legend: t tokens of a rank, n query heads, m key and
value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megalite.layers.attention_blocks import NO_WINDOW
from megalite.layers.documents import Documents
from megalite.layers.scores import Scores, by_head
from megalite.parallel.axes import Axis
from megalite.parallel.context import PieceSpan

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # not in every torch that we run with


def attend_around(cp: Axis, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None) -> Tensor:
    """Attention of a rank's own tokens: q `[t, n, d]`, k and v `[t, m, d]` -> `[t, n, d]`."""
    assert documents.share is not None, "a stream that is not cut"
    limit = NO_WINDOW if window is None else window
    return _attention(q, k, v, documents.share.pieces, [limit, cp.size, cp.rank], cp.group_name)[0]


@torch.library.custom_op("megalite_context::ring_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, numbers: Sequence[int], group_name: str
) -> tuple[Tensor, Tensor]:
    """The result, and `[t, n]` z.

    Args:
        pieces: `[spans, 6]`: the step in which a span's keys are here, and the span.
        numbers: the window, the ranks, and which this is.
    """
    ring = _Ring(numbers, group_name)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, log_z = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    for step, (keys, values) in enumerate(ring.rounds(k, v)):
        for span in _spans_in(pieces, step):
            rows, seen = _queries(span), slice(span.key, span.key + span.num_keys)
            found, found_z = _attend_piece(q[rows], keys[seen], values[seen], span.before, ring.window)
            _merge(out[rows], log_z[rows], found, found_z)
    return out.to(q.dtype), log_z


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, numbers: Sequence[int], group_name: str
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("megalite_context::ring_attention_gradients", mutates_args=())
def _gradients(
    grad: Tensor, kept: Sequence[Tensor], pieces: Tensor, numbers: Sequence[int], group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v; `kept` are they, the result and z."""
    q, k, v, out, log_z = kept
    ring = _Ring(numbers, group_name)
    mean = (grad.to(log_z.dtype) * out).sum(-1)
    dq = torch.zeros_like(q, dtype=log_z.dtype, memory_format=torch.contiguous_format)
    sums = torch.zeros(2, *k.shape, dtype=log_z.dtype, device=k.device)
    for step, (keys, values) in enumerate(ring.rounds(k, v)):
        for span in _spans_in(pieces, step):
            rows, seen = _queries(span), slice(span.key, span.key + span.num_keys)
            parts = (grad[rows], log_z[rows], mean[rows])
            found = _gradients_of_piece(q[rows], keys[seen], values[seen], *parts, span.before, ring.window)
            for total, part in zip((dq[rows], sums[0, seen], sums[1, seen]), found, strict=True):
                total += part
        sums = ring.pass_on(sums)()
    dk, dv = (total.to(k.dtype, copy=True) for total in sums)
    return dq.to(q.dtype), dk, dv


@_gradients.register_fake
def _(
    grad: Tensor, kept: Sequence[Tensor], pieces: Tensor, numbers: Sequence[int], group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = kept
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, pieces, ctx.numbers, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output, pieces)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *kept, pieces = ctx.saved_tensors
    return *_gradients(grad, kept, pieces, ctx.numbers, ctx.group_name), None, None, None


_attention.register_autograd(_backward, setup_context=_keep)


class _Ring:
    """The ranks in a ring, of which each sends to the next one."""

    def __init__(self, numbers: Sequence[int], group_name: str):
        window, self._size, self._rank = numbers
        self.window = None if window == NO_WINDOW else window
        self._group = _resolve_process_group(cast("GroupName", group_name))

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of this rank, then of the one before it, and so on; the next ones come meanwhile."""
        piece = torch.stack((k, v))
        for step in range(self._size):
            wait = self.pass_on(piece) if step + 1 < self._size else None
            yield piece[0], piece[1]
            if wait is not None:
                piece = wait()

    def pass_on(self, x: Tensor) -> Any:
        """Begin to send, and to receive as much; returns what waits for both and has what has come."""
        come = torch.empty_like(x)
        to, of = (dist.get_global_rank(self._group, (self._rank + by) % self._size) for by in (1, -1))
        both = [dist.P2POp(dist.isend, x, to, self._group), dist.P2POp(dist.irecv, come, of, self._group)]
        works = dist.batch_isend_irecv(both)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return come

        return wait


def _spans_in(pieces: Tensor, step: int) -> list[PieceSpan]:
    return [PieceSpan(*row) for of_step, *row in pieces.tolist() if of_step == step]


def _queries(span: PieceSpan) -> slice:
    return slice(span.query, span.query + span.num_queries)


def _attend_piece(q: Tensor, k: Tensor, v: Tensor, before: int, window: int | None) -> tuple[Tensor, Tensor]:
    """o and z of one span, `[queries, n, d]` and `[queries, n]`; -inf where a query sees none of the keys."""
    scores, values = Scores(q, k, 1, window, before), by_head(v, 1, v.shape[1])
    mixed = torch.zeros_like(scores.queries)
    log_z = mixed.new_full(mixed.shape[:2], -torch.inf)
    for heads, rows, keys in scores.blocks():
        block = scores.of_block(heads, rows, keys)
        found = block.logsumexp(-1)
        weights = block.sub_(_finite(found).unsqueeze(-1)).exp_()
        mixed[heads, rows] = torch.bmm(weights.to(v.dtype), values[heads, keys]).to(mixed.dtype)
        log_z[heads, rows] = found
    return _by_token(mixed, len(q)), _by_token(log_z.unsqueeze(-1), len(q)).squeeze(-1)


def _merge(out: Tensor, log_z: Tensor, found: Tensor, found_z: Tensor) -> None:
    """Add a piece to what was found before, in place."""
    both = torch.logaddexp(log_z, found_z)
    own, other = ((z - _finite(both)).exp_().unsqueeze(-1) for z in (log_z, found_z))
    out.mul_(own).add_(found * other)
    log_z.copy_(both)


def _gradients_of_piece(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, log_z: Tensor, mean: Tensor, before: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries, keys and values of one span, in the format of z."""
    scores = Scores(q, k, 1, window, before)
    keys_here, values, grads = (by_head(x, 1, k.shape[1]).to(scores.dtype) for x in (k, v, grad))
    z, means = (by_head(x.unsqueeze(-1), 1, k.shape[1]) for x in (log_z, mean))
    dq = torch.zeros_like(scores.queries)
    dk, dv = torch.zeros_like(keys_here), torch.zeros_like(values)
    for heads, rows, keys in scores.blocks():
        weights = scores.of_block(heads, rows, keys).sub_(z[heads, rows]).exp_()
        slopes = torch.bmm(grads[heads, rows], values[heads, keys].transpose(1, 2)).sub_(means[heads, rows])
        slopes *= weights
        dq[heads, rows] = torch.bmm(slopes, keys_here[heads, keys])
        dk[heads, keys] += torch.bmm(slopes.transpose(1, 2), scores.queries[heads, rows])
        dv[heads, keys] += torch.bmm(weights.transpose(1, 2), grads[heads, rows])
    return _by_token(dq.mul_(scores.scale), len(q)), _by_token(dk, len(k)), _by_token(dv, len(k))


def _finite(z: Tensor) -> Tensor:
    """0 in place of -inf, which nothing can be counted from."""
    return z.masked_fill(z == -torch.inf, 0.0)


def _by_token(x: Tensor, num_tokens: int) -> Tensor:
    """`[m, tokens x g, d]` -> `[tokens, m x g, d]`."""
    return x.unflatten(1, (num_tokens, -1)).transpose(0, 1).flatten(1, 2)
