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


def begin_runs(whole: Tensor, mine: Tensor, axis: Axis, tag: int = 0) -> list[dist.Work]:
    """Bring equally long runs of a flat tensor together, this rank's `mine` being in its place or not.

    Gloo's all-gather of a large tensor takes three times as long as messages from each rank to each other (63 MB a
    rank, two ranks with a core each: 100 and 27 ms), and beside other work far longer now and then.

    Args:
        tag: another one for each that is under way.
    """
    if dist.get_backend(axis.group) != "gloo" or mine.nbytes < LARGE_BYTES:
        return begun(fill_all_gather(whole, mine, group=axis.group, async_op=True))
    runs, works = whole.chunk(axis.size), list[dist.Work]()
    for distance in range(1, axis.size):
        receiver, sender = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        works += dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=axis.group, tag=tag, group_peer=receiver),
                dist.P2POp(dist.irecv, runs[sender], group=axis.group, tag=tag, group_peer=sender),
            ]
        )
    if runs[axis.rank].data_ptr() != mine.data_ptr():
        runs[axis.rank].copy_(mine)
    return works


LARGE_BYTES = 2**22
"""Of a run, from which on such messages take less time than an all-gather."""


def begun(work: dist.Work | None) -> list[dist.Work]:
    """What is to be waited for of a collective that was begun."""
    return [] if work is None else [work]


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
