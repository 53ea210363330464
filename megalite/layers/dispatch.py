"""Tokens to the ranks that have their experts, and back: an all-to-all each way.

    rows of a rank, in order of all experts        a a b c c d            ep 2: a, b | c, d
    sent to the experts' ranks                     a a b . . . from each
    put in order of the rank's own experts         a a a b b              their products are made
    and the same way back

How many rows go where every rank learns first, which is the one thing that is waited for. Whether a rank gets any or
none, it does the same.

Legend: n rows of this rank, m rows for its experts, h hidden size, e experts, r ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.axes import Axis


@torch.compiler.disable
def at_their_experts(experts: Callable[[Tensor, Tensor], Tensor], x: Tensor, sizes: Tensor, ep: Axis) -> Tensor:
    """What experts make of rows, wherever they are: `[n, h]` -> `[n, h]`. Collective.

    Args:
        experts: this rank's; given rows in their order `[m, h]`, and how many are each one's `[e / r]`.
        x: in order of the experts, the first rank's first.
        sizes: `[e]` int64, rows of each expert.
    """
    mine = torch.empty_like(sizes)
    dist.all_to_all_single(mine, sizes, group=ep.group)
    mine = mine.unflatten(0, (ep.size, -1))
    sent, received = torch.stack((sizes.unflatten(0, (ep.size, -1)).sum(1), mine.sum(1))).tolist()
    arrived = _Sent.apply(x, sent, received, ep)
    num_experts = mine.shape[1]
    of_rows = torch.arange(num_experts, device=x.device).repeat(ep.size).repeat_interleave(mine.flatten())
    order = of_rows.argsort(stable=True)
    inverse = order.argsort()
    y = experts(Permuted.apply(arrived, order, inverse), mine.sum(0))
    return _Sent.apply(Permuted.apply(y, inverse, order), received, sent, ep)


class Permuted(torch.autograd.Function):
    """Rows in another order, given where each comes from, and the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Sent(torch.autograd.Function):
    """Rows to other ranks, so many to each, and theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
        ctx.way_back = received, sent, axis
        return _send(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grad, *ctx.way_back), None, None, None


def _send(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), list(received), list(sent), group=axis.group)
    return arrived
