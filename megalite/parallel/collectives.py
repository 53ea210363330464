"""Collectives that autograd understands: pairs whose backward is each other's forward.

Tensor parallelism needs four moves, two of them with sequence parallelism (Shoeybi et al. 2019, section 3; Korthikanti
et al. 2022, section 4.2). `rows` are tokens, dim 0 of a stream `[tokens, hidden]`.

    op            forward                     backward
    copy_to       nothing                     all-reduce
    reduce_from   all-reduce                  nothing
    gather_rows   all-gather on dim 0         reduce-scatter on dim 0
    scatter_rows  reduce-scatter on dim 0     all-gather on dim 0

Context parallelism has its own: `gather_in_order`, a `gather_rows` of rows that do not follow one another, and the
all-to-all of `to_parts` and `to_rows`.

Over an axis of size 1 each returns its input untouched. The collectives are torch's functional ones, which return their
result instead of changing a buffer, as selective recomputation needs; over gloo all-gather and reduce-scatter are our
own. In a compiled block they are part of its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megalite.parallel.axes import Axis

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # not in every torch that we run with

Collective = Callable[[Tensor, Axis], Tensor]
Said = TypeVar("Said")

_ops = torch.ops._c10d_functional
"""Ops that return their result, and that the compiler knows."""

# torch 2.13 renamed them: the old names warn there, the new ones do not exist before.
fill_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
fill_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Hand a replicated tensor to parallel work; its gradient is the sum over the axis."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results over the axis; every rank gets the whole sum."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results that every rank goes on with in work of its own; gradients are summed alike."""
    return copy_to(reduce_from(x, axis), axis)


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """Join the rows that the ranks hold: `[t/n, ...]` -> `[t, ...]`; gradients are summed and cut again."""
    return x if axis.size == 1 else _GatherRows.apply(x, axis)


def scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results and keep this rank's rows: `[t, ...]` -> `[t/n, ...]`."""
    return x if axis.size == 1 else _ScatterRows.apply(x, axis)


def gather_in_order(x: Tensor, axis: Axis, order: Tensor, places: Tensor) -> Tensor:
    """Join the rows that the ranks hold as they stand in a stream: `[t/n, ...]` -> `[t, ...]`.

    Gradients are summed and cut again. Recomputation makes the result anew, which is n times what it is made of.

    Args:
        order: `[t]`, which rows the ranks hold, one rank after the other.
        places: `[t]`, where each row stands in that order.
    """
    return _GatherInOrder.apply(x, axis, order, places)


def to_parts(x: Tensor, axis: Axis) -> Tensor:
    """Each rank gets a part of all rows for all parts of its own: `[t/n, n, ...]` -> `[t, ...]`."""
    return _ToParts.apply(x, axis)


def to_rows(x: Tensor, axis: Axis) -> Tensor:
    """The way back: `[t, ...]` -> `[t/n, n, ...]`."""
    return _ToRows.apply(x, axis)


def replicated(sequence_parallel: bool) -> Collective:
    """How a weight that every rank holds whole enters its layer.

    With sequence parallelism each rank sees other tokens, so the weight's gradient is a partial sum: `copy_to` adds
    them up, before any engine sees them. Without, all ranks compute the same gradient and nothing is to be done.
    """
    return copy_to if sequence_parallel else keep


def keep(x: Tensor, axis: Axis) -> Tensor:
    """Do nothing: stands where another layout has a collective."""
    return x


def own_rows(x: Tensor, axis: Axis) -> Tensor:
    """This rank's rows of a tensor that all ranks have: `[t, ...]` -> `[t/n, ...]`. For numbers without gradient."""
    rows = x.shape[0] // axis.size
    return x[axis.rank * rows : (axis.rank + 1) * rows]


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` in place over the axis and return it. No gradient."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def any_rank(flag: bool, axis: Axis, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the axis. Collective, and a sync."""
    return agree((flag,), axis, device)[0]


def agree(flags: Sequence[bool], axis: Axis, device: torch.device) -> list[bool]:
    """Which of the flags are set on any rank of the axis. Collective, and one sync."""
    return [vote > 0 for vote in largest([int(flag) for flag in flags], axis, device)]


def largest(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[int]:
    """The largest that any rank of the axis has of each number. Collective, and one sync."""
    return all_reduce(on_device(numbers, torch.int64, device), axis, dist.ReduceOp.MAX).tolist()


def one_for_all(number: float, axis: Axis, device: torch.device) -> float:
    """The same number on every rank of the axis, where sums in another order may have left another last bit.
    Collective, and one sync."""
    return all_reduce(torch.tensor(number, dtype=torch.float64, device=device), axis, dist.ReduceOp.MAX).item()


def on_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor. Nothing waits for it: a GPU reads them from pages that it can get at by itself."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def from_all(mine: Said, axis: Axis) -> list[Said]:
    """What every rank of the axis has to say, in their order: anything that pickle takes, little and seldom.
    Collective."""
    if axis.size == 1:
        return [mine]
    said = [mine] * axis.size
    dist.all_gather_object(said, mine, group=axis.group)
    return said


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", axis.group_name))


def _gather(x: Tensor, axis: Axis) -> Tensor:
    if x.device.type == "cpu":
        return gather_by_gloo(x.contiguous(), axis.size, axis.group_name)
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group_name))


def _scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    if x.device.type == "cpu":
        return scatter_sum_by_gloo(x.contiguous(), axis.size, axis.group_name)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group_name))


@torch.library.custom_op("megalite_gloo::all_gather", mutates_args=())
def gather_by_gloo(x: Tensor, size: int, group_name: str) -> Tensor:
    """All-gather on dim 0, `[t/n, ...]` -> `[t, ...]`, by a collective with a short name.

    The two threads of a gloo group note the name of what each has done last in one string, without a lock (torch 2.13).
    A name of 16 letters or more lies on the heap, and two threads that free it at once end the process with "malloc():
    unaligned tcache chunk detected". The functional all-gather has such a name, `ALLGATHER_COALESCED`, and nothing else
    in training has: `_ALLGATHER_BASE` takes 15.
    """
    whole = x.new_empty(x.shape[0] * size, *x.shape[1:])
    fill_all_gather(whole, x, group=_resolve_process_group(cast("GroupName", group_name)))  # ops take plain text
    return whole


@gather_by_gloo.register_fake
def _(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0] * size, *x.shape[1:])


@torch.library.custom_op("megalite_gloo::scatter_sum", mutates_args=())
def scatter_sum_by_gloo(x: Tensor, size: int, group_name: str) -> Tensor:
    """Reduce-scatter on dim 0, `[t, ...]` -> `[t/n, ...]`: each rank is sent its rows and adds them up. Gloo's own
    sends all rows to all ranks, which takes 1.7 times as long."""
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=_resolve_process_group(cast("GroupName", group_name)))
    return added(parts, size)


@scatter_sum_by_gloo.register_fake
def _(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def added(parts: Tensor, size: int) -> Tensor:
    """The sum of what all ranks have sent, in their order, one after the other on dim 0: `[t, ...]` -> `[t/n, ...]`."""
    return parts.unflatten(0, (size, -1)).sum(0)


@torch.library.custom_op("megalite_context::gather", mutates_args=())
def gather_anew(x: Tensor, size: int, group_name: str) -> Tensor:
    """All-gather on dim 0 that recomputation does again."""
    whole = x.new_empty(x.shape[0] * size, *x.shape[1:])
    fill_all_gather(whole, x.contiguous(), group=_resolve_process_group(cast("GroupName", group_name)))
    return whole


@gather_anew.register_fake
def _(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0] * size, *x.shape[1:])


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all on dim 0, of which each rank gets one of n pieces."""
    sizes = [x.shape[0] // axis.size] * axis.size
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), sizes, sizes, axis.group_name))


def _parts(x: Tensor, axis: Axis) -> Tensor:
    return _exchange(x.transpose(0, 1).flatten(0, 1), axis)


def _rows(x: Tensor, axis: Axis) -> Tensor:
    return _exchange(x, axis).unflatten(0, (axis.size, -1)).transpose(0, 1)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_sum(grad, ctx.axis), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scatter_sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.axis), None


class _GatherInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, order: Tensor, places: Tensor) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(order)
        return gather_anew(x, axis.size, axis.group_name)[places]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return _scatter_sum(grad[order], ctx.axis), None, None, None


class _ToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _parts(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rows(grad, ctx.axis), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _rows(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _parts(grad, ctx.axis), None
