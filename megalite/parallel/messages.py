"""Collectives that are begun here and waited for later, while their rank does something else. No gradient.

Each gives back a function that waits for the result. Whatever order ranks do other things in, they begin messages of an
axis in one order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.axes import Axis
from megalite.parallel.collectives import added, fill_all_gather, fill_reduce_scatter

Arrival = Callable[[], Tensor]
"""Waits for a message, and has what came."""


def begin_sum(x: Tensor, axis: Axis) -> Arrival:
    """Sum `x` over the axis, in place."""
    return _arrival(dist.all_reduce(x, group=axis.group, async_op=True), x)


def begin_gather(x: Tensor, axis: Axis) -> Arrival:
    """Join the rows that the ranks hold: `[t/n, ...]` -> `[t, ...]`."""
    whole = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    return _arrival(fill_all_gather(whole, x.contiguous(), group=axis.group, async_op=True), whole)


def begin_scatter_sum(x: Tensor, axis: Axis) -> Arrival:
    """Sum partial results, and keep this rank's rows: `[t, ...]` -> `[t/n, ...]`."""
    if x.device.type != "cpu":
        mine = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
        return _arrival(fill_reduce_scatter(mine, x, group=axis.group, async_op=True), mine)
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=axis.group, async_op=True)
    arrival = _arrival(work, parts)
    return lambda: added(arrival(), axis.size)


def sum_of_rows(make: Callable[[int, Tensor], None], like: Tensor, axis: Axis) -> Tensor:
    """Sum partial results that are made here rank by rank, each on its way while the next is made: `[t/n, ...]`.

    Args:
        make: given a rank, writes the rows that go to it.
        like: of the rows of one rank: their shape, format and device.
    """
    parts = like.new_empty(axis.size, *like.shape)
    works, sending = list[dist.Work](), list[Tensor]()
    for distance in range(1, axis.size):
        receiver, sender = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        sending.append(sent := torch.empty_like(like))
        make(receiver, sent)
        works += dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=axis.group, group_peer=receiver),
                dist.P2POp(dist.irecv, parts[sender], group=axis.group, group_peer=sender),
            ]
        )
    make(axis.rank, parts[axis.rank])
    for work in works:
        work.wait()
    return parts.sum(0)


def _arrival(work: dist.Work | None, result: Tensor) -> Arrival:
    def arrive() -> Tensor:
        if work is not None:
            work.wait()
        return result

    return arrive
