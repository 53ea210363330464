"""Tokens to the ranks that have their experts, and back: an all-to-all each way.

    rows of a rank, in order of all experts        a a b c c d            ep 2: a, b | c, d
    sent to the experts' ranks                     a a b . . . from each
    put in order of the rank's own experts         a a a b b              their products are made
    and the same way back

How many rows go where every rank learns first, which is waited for. The rows travel while the shared MLP is at work,
and so do their gradients in the backward pass: what begins a message is older than the shared MLP's graph there, and
what ends it is younger. Whether a rank gets any rows or none, it does the same.

Legend: n rows of this rank, m rows for its experts, h hidden size, e experts, r ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.axes import Axis

Made = TypeVar("Made")


@torch.compiler.disable
def at_their_experts(
    experts: Callable[[Tensor, Tensor], Tensor], x: Tensor, sizes: Tensor, ep: Axis, meanwhile: Callable[[], Made]
) -> tuple[Tensor, Made]:
    """What experts make of rows, wherever they are: `[n, h]` -> `[n, h]`. Collective.

    Args:
        experts: this rank's; given rows in their order `[m, h]`, and how many are each one's `[e / r]`.
        x: in order of the experts, the first rank's first; rows behind theirs stay here, and zeros come out for them.
        sizes: `[e]` int64, rows of each expert.
        meanwhile: is done while rows travel, and its result is returned too.
    """
    mine = torch.empty_like(sizes)
    dist.all_to_all_single(mine, sizes, group=ep.group)
    mine = mine.unflatten(0, (ep.size, -1))
    sent, received = torch.stack((sizes.unflatten(0, (ep.size, -1)).sum(1), mine.sum(1))).tolist()
    there = Message(sent, received, ep)
    arriving = BeginMessage.apply(x[: sum(sent)], there)
    made = meanwhile()
    arrived = EndMessage.apply(arriving, there)
    rows = torch.arange(arrived.shape[0], device=x.device)
    runs = torch.searchsorted(mine.flatten().cumsum(0), rows, right=True)  # each rank's rows of each expert
    order = (runs % mine.shape[1]).argsort(stable=True)
    inverse = order.argsort()
    y = experts(Permuted.apply(arrived, order, inverse), mine.sum(0))
    back = Message(received, sent, ep)
    returned = EndMessage.apply(BeginMessage.apply(Permuted.apply(y, inverse, order), back), back)
    if returned.shape[0] < x.shape[0]:
        returned = torch.cat((returned, x.new_zeros(x.shape[0] - returned.shape[0], returned.shape[1])))
    return returned, made


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


class Message:
    """Rows to other ranks, so many to each, and theirs; one way at a time."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], axis: Axis):
        self._sent, self._received, self._axis = list(sent), list(received), axis
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None

    def begin(self, x: Tensor, *, is_back: bool = False) -> Tensor:
        """Begin to send rows, or to send gradients back; what will have come when it is ended."""
        sent, received = (self._received, self._sent) if is_back else (self._sent, self._received)
        x = x.contiguous()
        arriving = x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(arriving, x, received, sent, group=self._axis.group, async_op=True)
        self._under_way = work, x, arriving  # x must not be written over until it has gone
        return arriving

    def end(self) -> Tensor:
        """What has come, all of it."""
        assert self._under_way is not None, "it has begun"
        work, _, arrived = self._under_way
        if work is not None:
            work.wait()
        self._under_way = None
        return arrived


class BeginMessage(torch.autograd.Function):
    """Begins a message; its backward pass ends the one back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: Message) -> Tensor:
        ctx.message = message
        return message.begin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.message.end(), None


class EndMessage(torch.autograd.Function):
    """Ends a message; its backward pass begins the one back, which brings more rows or fewer than autograd may be given
    here: it gets zeros that take no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: Message) -> Tensor:
        ctx.message = message
        message.end()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.message.begin(grad, is_back=True)
        return grad.new_zeros(()).expand_as(grad), None
