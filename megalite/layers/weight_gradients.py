"""Gradients of weights by products that can wait, and that add to a sum by themselves.

Autograd makes a weight's gradient anew in each micro-batch and then adds it to those before: a pass over all weights
that no product needs. And it makes it at once, where a pipeline could have handed on the input's gradient first. So an
engine that keeps the sums has each linear layer multiply by a `SummedLinear`:

    forward     y  = x w^T
    backward    dx = dy w        returned to autograd, with no gradient of the weight
                dw = dy^T x      a `WeightGradient`, handed to the engine: to be made now, or when it likes

Legend: x [t, in], w [out, in], y and dy [t, out].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.layers import opaque
from megalite.layers.gemm import Gemm


class WeightGradient(Protocol):
    """A gradient of a weight, from one use of it in one micro-batch, that may be yet to be made."""

    def make(self) -> Tensor:
        """The gradient, of the weight's shape."""
        ...

    def add_to(self, total: Tensor) -> None:
        """Add it to a sum, at least fp32."""
        ...

    def begin(self, total: Tensor) -> None:
        """Begin a sum with it: what stood there goes."""
        ...


TakeGradient = Callable[[nn.Parameter, WeightGradient], None]
"""Called once for each use of a weight in a backward pass."""


class ProductGradient:
    """`dy^T x` by a backend."""

    def __init__(self, gemm: Gemm, grad: Tensor, x: Tensor):
        self._gemm, self._grad, self._x = gemm, grad, x

    def make(self) -> Tensor:
        return self._gemm.multiply(self._grad.t(), self._x.t())

    def add_to(self, total: Tensor) -> None:
        self._gemm.add_product(total, self._grad, self._x)

    def begin(self, total: Tensor) -> None:
        self._gemm.begin_product(total, self._grad, self._x)


class WholeGradient:
    """One that can only be made whole, or that is there already."""

    def __init__(self, make: Callable[[], Tensor]):
        self.make = make

    def add_to(self, total: Tensor) -> None:
        total.add_(self.make())

    def begin(self, total: Tensor) -> None:
        total.copy_(self.make())


class ScaledGradient:
    """One that is there but for a factor, a scalar on its device."""

    def __init__(self, tensor: Tensor, factor: Tensor):
        self._tensor, self._factor = tensor, factor

    def make(self) -> Tensor:
        return self._tensor * self._factor

    def add_to(self, total: Tensor) -> None:
        total.addcmul_(self._tensor, self._factor)

    def begin(self, total: Tensor) -> None:
        torch.mul(self._tensor, self._factor, out=total)


class RowsGradient:
    """One of a table, which is zero but for the rows that were looked up: neither made nor passed over whole.

    Args:
        grad: `[t, h]`, of what was looked up.
        rows: `[t]` int64, where; some of them often.
        num_rows: of the table.
    """

    def __init__(self, grad: Tensor, rows: Tensor, num_rows: int):
        self._grad, self._rows, self._num_rows = grad, rows, num_rows

    def make(self) -> Tensor:
        total = self._grad.new_zeros(self._num_rows, self._grad.shape[1])
        self.add_to(total)
        return total

    def add_to(self, total: Tensor) -> None:
        total.index_add_(0, self._rows, self._grad.to(total.dtype))

    def begin(self, total: Tensor) -> None:
        total.zero_()
        self.add_to(total)


class SummedLinear:
    """How one linear layer multiplies, as `layers.gemm.Gemm`, when somebody else keeps its weight's gradient.

    Args:
        weight: the layer's parameter itself: what recomputation and compiled graphs hand to a backward pass is a copy.
        gemm: the backend.
        take: gets the gradients.
        is_redone: what the layer is given is made again in the backward pass.
    """

    def __init__(self, weight: nn.Parameter, gemm: Gemm, take: TakeGradient, *, is_redone: bool = False):
        self.weight, self.take, self.is_redone = weight, take, is_redone
        self._gemm, self._number = gemm, opaque.number_of(self)
        self.multiply, self.add_product, self.begin_product = gemm.multiply, gemm.add_product, gemm.begin_product

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients."""
        if torch.compiler.is_compiling():
            return opaque.linear(x, weight, self._number, hands_over=True)
        if self.is_redone:
            passed = list[Tensor]()
            return _ProductOfKept.apply(_Operands.apply(x, weight, self, passed), weight.detach(), self, passed)
        return _SummedProduct.apply(x, weight, self)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """y."""
        return self._gemm.multiply(x, weight)

    def product_as_op(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same, by an op whose result selective recomputation can keep."""
        return self.product(x, weight)

    def gradients(self, grad: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, None]:
        """dx; dw is handed over.

        Args:
            x: None where the weight is frozen, and nothing is made of it.
        """
        self.hand_over(grad, x)
        return self._gemm.multiply(grad, weight.t()), None

    def hand_over(self, grad: Tensor, x: Tensor | None) -> None:
        """dw."""
        if x is not None:
            self.take(self.weight, ProductGradient(self._gemm, grad, x))


class _SummedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SummedLinear) -> Tensor:
        ctx.save_for_backward(x if layer.weight.requires_grad else None, weight)
        ctx.layer = layer
        return layer.product_as_op(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad_x, _ = ctx.layer.gradients(grad, *ctx.saved_tensors)
        return grad_x, None, None


class _Operands(torch.autograd.Function):
    """Keeps what gradients are made of before the product is made: recomputation stops as soon as it has all that was
    kept, so that a block's last product, and what that sends, is not done again. (Torch's own products keep their
    operands first, too; a function of one's own keeps them when it is through.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SummedLinear, passed: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.passed = layer, passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor, None, None, None]:
        grad_x, _ = ctx.layer.gradients(ctx.passed.pop(), *ctx.saved_tensors)
        return grad_x, None, None, None


class _ProductOfKept(torch.autograd.Function):
    """The product, whose gradient is passed on to where the operands are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SummedLinear, passed: list[Tensor]) -> Tensor:
        ctx.shape, ctx.passed = x.shape, passed
        return layer.product_as_op(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.passed.append(grad)
        return grad.new_empty(()).expand(ctx.shape), None, None, None
