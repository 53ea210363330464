"""Products of tensor-parallel layers beside the messages that they wait for or make.

A layer whose weight's gradient somebody else keeps need not do one thing after the other:

                       forward pass                               backward pass
    column-parallel    x w^T                                      dx is summed over tp while dw is made
      and sequences    this rank's rows are multiplied while      the same, each rank getting its rows
                       those of the others arrive
    row-parallel       the second half of the rows is multiplied  (sends nothing)
                       while the first is summed over tp
      and sequences    the rows of one rank are on their way      this rank's rows are multiplied while
                       while those of the next are multiplied     those of the others arrive

Only the layers' own messages are meant, so a layer that has one does not `enter` or `leave` by a collective any more.
What is sent, and kept for the backward pass, is as without; sums of rows are in another order.

Under sequence parallelism on GPUs of one node the rows may go through memory that these share, by torch's own ops
(async tensor parallelism): a rank reads those of others out of their memory and writes its results into it, piece by
piece beside its products, where a collective has kernels of its own. What is summed beside a weight's gradient still
is by a collective.

Legend: t tokens of the whole stream, of which a rank has t/n; shapes as in `layers.weight_gradients`.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from megalite.layers import opaque
from megalite.layers.gemm import Gemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.weight_gradients import SummedLinear, TakeGradient
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import copy_to, gather_rows, keep, reduce_from, scatter_rows
from megalite.parallel.messages import Arrival, begin_gather, begin_scatter_sum, begin_sum, sum_of_rows


def overlap(
    layer: ColumnParallelLinear | RowParallelLinear,
    gemm: Gemm,
    take: TakeGradient,
    *,
    is_redone: bool = False,
    is_symmetric: bool = False,
) -> SummedLinear:
    """How a layer multiplies, whose messages are its product's from here on.

    Args:
        take: gets the weight's gradients.
        is_redone: what the layer is given is made again in the backward pass.
        is_symmetric: under sequence parallelism, messages go through memory that GPUs share.
    """
    kinds: dict[Any, type[_Overlapped]] = {
        copy_to: _SummedInput,
        gather_rows: _GatheredInput,
        reduce_from: _SummedOutput,
        scatter_rows: _ScatteredOutput,
    }
    if is_symmetric:
        kinds |= {gather_rows: _SymmetricGatheredInput, scatter_rows: _SymmetricScatteredOutput}
    message = layer.enter if isinstance(layer, ColumnParallelLinear) else layer.leave
    if layer.tp.size == 1 or message not in kinds:
        return SummedLinear(layer.weight, gemm, take, is_redone=is_redone)
    if isinstance(layer, ColumnParallelLinear):
        layer.enter = keep
    else:
        layer.leave = keep
    return kinds[message](layer, gemm, take, is_redone)


class _Overlapped(SummedLinear):
    """One of the four."""

    def __init__(
        self, layer: ColumnParallelLinear | RowParallelLinear, gemm: Gemm, take: TakeGradient, is_redone: bool
    ):
        super().__init__(layer.weight, gemm, take, is_redone=is_redone)
        self.axis: Axis = layer.tp

    def _multiply_by_rank(self, mine: Tensor, arrival: Arrival, right: Tensor) -> tuple[Tensor, Tensor]:
        """The product of all ranks' rows `[t, k]`, this rank's being here already, with `right [n, k]`: `[t, n]`; and
        those rows."""
        product = mine.new_empty(self.axis.size * mine.shape[0], right.shape[0])
        of_rank = product.unflatten(0, (self.axis.size, -1))
        self._gemm.multiply(mine, right, of_rank[self.axis.rank])
        whole = arrival()
        for rank, rows in enumerate(whole.unflatten(0, (self.axis.size, -1))):
            if rank != self.axis.rank:
                self._gemm.multiply(rows, right, of_rank[rank])
        return product, whole


class _SummedInput(_Overlapped):
    def gradients(self, grad: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, None]:
        arrival = begin_sum(self._gemm.multiply(grad, weight.t()), self.axis)
        self.hand_over(grad, x)
        return arrival(), None


class _GatheredInput(_Overlapped):
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return opaque.gathered_linear(x, weight, self._number, self.axis.size)

    def product_of_gathered(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`x [t/n, in]` -> `y [t, out]`, and x of all ranks."""
        return self._multiply_by_rank(x, begin_gather(x, self.axis), weight)

    def gradients(self, grad: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, None]:
        """`dx [t/n, in]`, x being that of all ranks."""
        arrival = begin_scatter_sum(self._gemm.multiply(grad, weight.t()), self.axis)
        self.hand_over(grad, x)
        return arrival(), None


class _SummedOutput(_Overlapped):
    def product_as_op(self, x: Tensor, weight: Tensor) -> Tensor:
        return opaque.linear(x, weight, self._number, hands_over=True)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        arrivals, half = list[Arrival](), max(1, ceil(x.shape[0] / 2))
        for rows, summed in zip(x.split(half), y.split(half), strict=True):
            self._gemm.multiply(rows, weight, summed)
            arrivals.append(begin_sum(summed, self.axis))
        for arrival in arrivals:
            arrival()
        return y


class _ScatteredOutput(_Overlapped):
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.product_as_op(x, weight) if torch.compiler.is_compiling() else super().linear(x, weight)

    def product_as_op(self, x: Tensor, weight: Tensor) -> Tensor:
        return opaque.linear(x, weight, self._number, hands_over=True, num_rows=x.shape[0] // self.axis.size)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.unflatten(0, (self.axis.size, -1))

        def make(rank: int, out: Tensor) -> None:
            self._gemm.multiply(rows[rank], weight, out)

        return sum_of_rows(make, x.new_empty(rows.shape[1], weight.shape[0]), self.axis)

    def gradients(self, grad: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, None]:
        """dx of all rows, `grad [t/n, out]` being those of this rank's."""
        grad_x, whole = self._multiply_by_rank(grad, begin_gather(grad, self.axis), weight.t())
        self.hand_over(whole, x)
        return grad_x, None


class _SymmetricGatheredInput(_GatheredInput):
    def product_of_gathered(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`x [t/n, in]` -> `y [t, out]`, and x of all ranks."""
        return _gathered_product(x, weight, self.axis)


class _SymmetricScatteredOutput(_ScatteredOutput):
    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` -> `y [t/n, out]`, summed over the axis."""
        name = self.axis.group_name
        summed: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, name)
        return summed

    def gradients(self, grad: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, None]:
        """dx of all rows, `grad [t/n, out]` being those of this rank's."""
        grad_x, whole = _gathered_product(grad, weight.t(), self.axis)
        self.hand_over(whole, x)
        return grad_x, None


def _gathered_product(mine: Tensor, right: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The product of all ranks' rows, this rank's being `mine [t/n, k]`, with `right [n, k]`: `[t, n]`; and those
    rows `[t, k]`."""
    whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(mine.contiguous(), [right.t()], 0, axis.group_name)
    return product, whole
