"""Products of rows that lie in groups, each group by a matrix of its own: what experts are made of.

    y[a:b] = x[a:b] w[e]^T        rows a to b-1 are group e's
    dx[a:b] = dy[a:b] w[e]        dw[e] = dy[a:b]^T x[a:b]

All matrices lie in one parameter, one below the other. On GPUs one kernel multiplies all groups and nobody waits for
their sizes (`F.grouped_mm`, in bf16); elsewhere they are multiplied one by one. y and dx may be made by others
(`Rows`), as in FP8 (`fp8.grouped`). Gradients of the matrices can be handed over, as those of a `SummedLinear`. An op
keeps it one step of a compiled block, and of what recomputation keeps.

Rows behind the last group's are of no matrix: y and dx are zero there.

Legend: n rows, g groups; x `[n, in]`, w `[g * out, in]`, y and dy `[n, out]`; sizes `[g]` int64, rows of each group. Of
either product: rows `[n, k]`, matrices `[g, m, k]`, which gives `[n, m]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.layers import opaque
from megalite.layers.gemm import Gemm
from megalite.layers.weight_gradients import WeightGradient

RowsRole = Literal["activation", "gradient"]
"""What the rows are: x, whose product is y, or dy, whose product is dx."""

UNITS = (256, 32, 1)
"""Rows of a piece are a multiple of the first of these that they are enough for. oneDNN makes a program for each number
of rows, which takes 0.4 ms, as long as 200 rows of a 384 x 1024 product on two cores of a Zen 5, and keeps a thousand.
Groups have other sizes in each step; pieces soon have been there before."""


class Rows(Protocol):
    """What multiplies rows by the matrices of their groups, without gradients."""

    def multiply(self, role: RowsRole, rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
        """`[n, k]` and `[g, m, k]` -> `[n, m]`; what lies behind the last group's rows may be anything."""
        ...


class PlainRows:
    """In their own format."""

    def __init__(self, gemm: Gemm):
        self.gemm = gemm

    def multiply(self, role: RowsRole, rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
        if _has_kernel(rows):
            return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends(sizes))
        y = rows.new_empty(rows.shape[0], matrices.shape[1])
        for index, pieces in groups(sizes):
            for piece in pieces:
                self.gemm.multiply(rows[piece], matrices[index], y[piece])
        return y


class GroupedProduct:
    """How one stack of matrices multiplies. It knows none of them: a parameter that is divided among ranks would stay
    whole in the memory of each for as long as anybody knows it.

    Args:
        may_spare: there may be rows behind the last group's.
    """

    def __init__(self, gemm: Gemm, *, may_spare: bool = False):
        self.gemm, self.may_spare = gemm, may_spare
        self.rows: Rows = PlainRows(gemm)
        self.take: Callable[[WeightGradient], None] | None = None
        """Gets the gradients; None leaves them to autograd."""
        self._number = opaque.number_of(self)

    def __call__(self, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        """`[n, in]` -> `[n, out]`, with gradients.

        Args:
            weight: `[g * out, in]`.
        """
        return _grouped_product(x, weight, sizes, self._number, self.take is not None)

    def product(self, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        """y."""
        return self._zero_spare(self.rows.multiply("activation", x, _stacked(weight, sizes), sizes), sizes)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor | None]:
        """dx, and dw where it is not handed over."""
        made = GroupedGradient(self.gemm, grad.detach(), x.detach(), sizes)
        matrices = _stacked(weight, sizes).transpose(1, 2)
        grad_x = self._zero_spare(self.rows.multiply("gradient", grad, matrices, sizes), sizes)
        if self.take is None:
            return grad_x, made.make()
        self.take(made)
        return grad_x, None

    def _zero_spare(self, y: Tensor, sizes: Tensor) -> Tensor:
        """No product wrote the rows behind the last group's. Nothing waits for the sizes."""
        if not self.may_spare:
            return y
        is_spare = torch.arange(y.shape[0], device=y.device) >= sizes.sum()
        return y.masked_fill_(is_spare.unsqueeze(1), 0.0)


class GroupedGradient:
    """`dy^T x` of each group; see `weight_gradients.WeightGradient`."""

    def __init__(self, gemm: Gemm, grad: Tensor, x: Tensor, sizes: Tensor):
        self._gemm, self._grad, self._x, self._sizes = gemm, grad, x, sizes

    def make(self) -> Tensor:
        if _has_kernel(self._x):
            return F.grouped_mm(self._grad.t(), self._x, offs=ends(self._sizes)).flatten(0, 1)
        total = self._x.new_empty(self._sizes.shape[0] * self._grad.shape[1], self._x.shape[1])
        self.begin(total)
        return total

    def add_to(self, total: Tensor) -> None:
        if _has_kernel(self._x):
            total.add_(self.make())
            return
        parts = _stacked(total, self._sizes)
        for index, pieces in groups(self._sizes):
            for rows in pieces:
                self._gemm.add_product(parts[index], self._grad[rows], self._x[rows])

    def begin(self, total: Tensor) -> None:
        if _has_kernel(self._x):
            total.copy_(self.make())
            return
        parts = _stacked(total, self._sizes)
        for index, pieces in groups(self._sizes):
            if not pieces:
                parts[index].zero_()
            for number, rows in enumerate(pieces):
                work = self._gemm.add_product if number else self._gemm.begin_product
                work(parts[index], self._grad[rows], self._x[rows])


def _has_kernel(x: Tensor) -> bool:
    """Whether all groups are multiplied at once."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def _stacked(weight: Tensor, sizes: Tensor) -> Tensor:
    """`[g, out, in]`."""
    return weight.unflatten(0, (sizes.shape[0], -1))


def ends(sizes: Tensor) -> Tensor:
    """Where each group ends, as the kernel wants it."""
    return sizes.cumsum(0).to(torch.int32)


def groups(sizes: Tensor) -> Iterator[tuple[int, list[slice]]]:
    """Each group's number, and its rows in pieces. Waits for the sizes."""
    stops = [0, *itertools.accumulate(sizes.tolist())]
    for index, (start, stop) in enumerate(itertools.pairwise(stops)):
        yield index, in_pieces(start, stop)


def in_pieces(start: int, stop: int) -> list[slice]:
    """Rows start to stop-1 in few pieces, of few different sizes."""
    pieces = []
    for unit in UNITS:
        size = (stop - start) // unit * unit
        if size:
            pieces.append(slice(start, start + size))
            start += size
    return pieces


@torch.library.custom_op("megalite::grouped_product", mutates_args=())
def _grouped_product(x: Tensor, weight: Tensor, sizes: Tensor, number: Tensor, hands_over: bool) -> Tensor:
    return opaque.layer_of(number, GroupedProduct).product(x, weight, sizes)


@_grouped_product.register_fake
def _(x: Tensor, weight: Tensor, sizes: Tensor, number: Tensor, hands_over: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // sizes.shape[0])


@torch.library.custom_op("megalite::grouped_gradients", mutates_args=())
def _grouped_gradients(grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = opaque.layer_of(number, GroupedProduct).gradients(grad, x, weight, sizes)
    assert grad_weight is not None, "it was handed over"
    return grad_x, grad_weight


@_grouped_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.custom_op("megalite::grouped_input_gradient", mutates_args=())
def _grouped_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor, number: Tensor) -> Tensor:
    grad, x, sizes = opaque.own_copies(grad, x, sizes)
    grad_x, grad_weight = opaque.layer_of(number, GroupedProduct).gradients(grad, x, weight, sizes)
    assert grad_weight is None, "nobody would get it"
    return grad_x


@_grouped_input_gradient.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor, number: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.hands_over = inputs[4]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.hands_over:
        return _grouped_input_gradient(grad.contiguous(), *ctx.saved_tensors), None, None, None, None
    return *_grouped_gradients(grad.contiguous(), *ctx.saved_tensors), None, None, None


_grouped_product.register_autograd(_backward, setup_context=_keep_inputs)
