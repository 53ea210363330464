"""Where a stage may multiply in FP8: one layer each, or one product of all experts of a block.

A site multiplies in FP8 or, where FP8 did harm, in the stage's own format again. It changes its way between steps,
unseen by compiled blocks (`layers.opaque`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from megalite.layers.fp8.grouped import Fp8Rows
from megalite.layers.fp8.quantise import Quantised
from megalite.layers.fp8.recipes import Role
from megalite.layers.fp8.watch import Gauge
from megalite.layers.gemm import Gemm, LinearGemm
from megalite.layers.grouped import GroupedProduct, Rows, RowsRole
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.opaque import linear, number_of
from megalite.layers.weight_gradients import SummedLinear, WeightGradient


class Rounding(Protocol):
    """What multiplies in FP8, in so far as every site asks the same of it."""

    def forget_weights(self) -> None:
        """Round weights anew at their next use."""
        ...

    def quantise(self, role: Role, x: Tensor) -> Quantised | None:
        """An operand as it is rounded, for the watch; None where only the library knows."""
        ...


class Fp8Layer(LinearGemm, Rounding, Protocol):
    """A linear layer's products in FP8, by some backend."""

    has_gradients: bool
    """Whether there is `gradients`, so that a compiled block may take the products in as ops; else its graph ends
    before each of them."""

    hand_over: Callable[[WeightGradient], None] | None
    """Gets gradients of the weight, which autograd then does not; None while autograd does. Set by the site."""

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of `x` and `weight`, from that of the product."""
        ...


Fast = TypeVar("Fast", bound=Rounding)
Plain = TypeVar("Plain")


class Site(Generic[Fast, Plain]):
    """One way to multiply, which may change between steps.

    Args:
        name: in the model.
        fp8: multiplies in FP8.
        plain: multiplies in the stage's own format.
    """

    def __init__(self, name: str, fp8: Fast, plain: Plain):
        self.name, self.fp8, self.plain = name, fp8, plain
        self._way: Fast | Plain = fp8
        self._gauge: Gauge | None = None
        self.retired_at: int | None = None
        """The step after which FP8 was given up here."""
        self.was_over = False
        """Whether the last measurement found more error than is allowed."""

    def use_fp8(self) -> None:
        """Multiply in FP8, unless that was given up."""
        self._way, self._gauge = (self.fp8 if self.retired_at is None else self.plain), None

    def use_gauge(self, gauge: Gauge) -> None:
        """Multiply in FP8 and measure what that does."""
        self._way, self._gauge = self.fp8, gauge

    def use_plain(self) -> None:
        """Multiply in the stage's own format."""
        self._way, self._gauge = self.plain, None

    def retire(self, step: int) -> None:
        """Give FP8 up for good."""
        self.retired_at = step
        self.fp8.forget_weights()
        self.use_fp8()

    def measure(self, gauge: Gauge, role: Role, operand: Tensor) -> None:
        """Take in what rounding does to an operand."""
        rounded = self.fp8.quantise(role, operand.detach())
        if rounded is not None:
            gauge.operand(role, operand, rounded)


class LinearSite(Site[Fp8Layer, Gemm]):
    """One linear layer's. The layer's own gemm is one that makes bare products too."""

    def __init__(self, name: str, layer: ColumnParallelLinear | RowParallelLinear, fp8: Fp8Layer):
        super().__init__(name, fp8, cast("Gemm", layer.gemm))
        if isinstance(layer.gemm, SummedLinear):
            fp8.hand_over = partial(layer.gemm.take, layer.weight)
        self._number = number_of(self) if fp8.has_gradients else None
        layer.gemm = self

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients, in the present way."""
        if self._number is not None and torch.compiler.is_compiling():
            return linear(x, weight, self._number, hands_over=isinstance(self.plain, SummedLinear))
        return self._multiply(x, weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `layers.opaque.OpaqueLayer`."""
        return self._multiply(x, weight)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `layers.opaque.OpaqueLayer`."""
        if self._way is self.plain and isinstance(self.plain, SummedLinear):
            return self.plain.gradients(grad, x, weight)
        if self._way is self.plain:
            return self.plain.multiply(grad, weight.t()), self.plain.multiply(grad.t(), x.t())
        if self._gauge is not None:
            self.measure(self._gauge, "gradient", grad)
        return self.fp8.gradients(grad, x, weight)

    @torch.compiler.disable
    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        gauge = self._gauge
        y = self._way.linear(x, weight)
        if gauge is None or not torch.is_grad_enabled():  # without gradients it is a pass beside the step's own
            return y
        with torch.no_grad():
            gauge.product(y, self.plain.linear(x, weight))
            self.measure(gauge, "activation", x)
            self.measure(gauge, "weight", weight)
        if y.requires_grad:
            y.register_hook(lambda grad: self.measure(gauge, "gradient", grad))
        return y


class GroupedSite(Site[Fp8Rows, Rows]):
    """One product of all experts of a block. In a measurement all of its matrices are one operand."""

    def __init__(self, name: str, product: GroupedProduct, fp8: Fp8Rows):
        super().__init__(name, fp8, product.rows)
        product.rows = self

    def multiply(self, role: RowsRole, rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
        """See `layers.grouped.Rows`."""
        y = self._way.multiply(role, rows, matrices, sizes)
        if self._gauge is not None and (num_rows := int(sizes.sum())):
            with torch.no_grad():
                self._look(self._gauge, role, rows[:num_rows], matrices, sizes, y)
        return y

    def _look(self, gauge: Gauge, role: RowsRole, rows: Tensor, matrices: Tensor, sizes: Tensor, y: Tensor) -> None:
        self.measure(gauge, role, rows)
        if role == "activation":
            gauge.product(y[: rows.shape[0]], self.plain.multiply(role, rows, matrices, sizes))
            for matrix, rounded in zip(matrices, self.fp8.round_matrices(matrices, transposed=False), strict=True):
                gauge.operand("weight", matrix, rounded)
