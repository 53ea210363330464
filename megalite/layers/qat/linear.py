"""How a layer multiplies by its rounded weight.

    forward    y  = x r(w)^T
    backward   dx = dy r(w)        what the forward pass did, done backwards
               dw = dy^T x         of the weight itself: the gradient passes straight through (Bengio et al. 2013)

Only the weight differs from plain products, so all that takes gradients of weights (`layers.weight_gradients`,
`layers.grouped`) stays: sums that products add to, gradients that wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import QatConfig
from megalite.layers import opaque
from megalite.layers.gemm import Gemm
from megalite.layers.grouped import Rows, RowsRole
from megalite.layers.qat.integers import to_integers
from megalite.layers.weight_gradients import SummedLinear
from megalite.parallel.axes import Axis


class RoundedWeight:
    """What a weight is rounded to: once a step in training, anew outside of it.

    Args:
        across: ranks that have other parts of the same rows.
        keep: keep it until the step ends; not where weights are gathered for each use.
    """

    def __init__(self, qat: QatConfig, across: Axis, *, keep: bool):
        self.is_on = qat.start_step <= 1
        self._qat, self._across, self._keep = qat, across, keep
        self._kept: Tensor | None = None

    def of(self, weight: Tensor, scale: Tensor | None = None, *, in_training: bool) -> Tensor:
        """`[..., out, in]`, in the weight's format; the weight itself while nothing is rounded yet.

        Args:
            scale: see `to_integers`.
        """
        if not self.is_on:
            return weight.detach()
        if self._kept is not None:
            return self._kept
        rounded = to_integers(weight, self._qat, self._across, scale).values()
        if self._keep and in_training:
            self._kept = rounded
        return rounded

    def forget(self) -> None:
        """The weight changes."""
        self._kept = None


class RoundedLinear:
    """How one linear layer multiplies, as `layers.gemm.LinearGemm`.

    Args:
        plain: what it multiplied with before; a `SummedLinear` has the weight's gradient handed over.
    """

    def __init__(self, plain: Gemm, weight: RoundedWeight):
        self.plain, self.weight = plain, weight
        self._number = opaque.number_of(self)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients."""
        if torch.compiler.is_compiling():
            return opaque.linear(x, weight, self._number, hands_over=isinstance(self.plain, SummedLinear))
        return _RoundedProduct.apply(x, weight, self, torch.is_grad_enabled())

    def product(self, x: Tensor, weight: Tensor, *, in_training: bool | None = None) -> Tensor:
        """y."""
        in_training = torch.is_grad_enabled() if in_training is None else in_training
        return self.plain.multiply(x, self.weight.of(weight, in_training=in_training))

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """dx, and dw where it is not handed over."""
        rounded = self.weight.of(weight, in_training=True)
        if isinstance(self.plain, SummedLinear):
            return self.plain.gradients(grad, x, rounded)
        return self.plain.multiply(grad, rounded.t()), self.plain.multiply(grad.t(), x.t())


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RoundedLinear, in_training: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.product(x, weight, in_training=in_training)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.gradients(grad, *ctx.saved_tensors), None, None


class RoundedRows:
    """How experts multiply their rows; see `layers.grouped.Rows`."""

    def __init__(self, plain: Rows, weight: RoundedWeight):
        self.plain, self.weight = plain, weight

    def multiply(self, role: RowsRole, rows: Tensor, matrices: Tensor, sizes: Tensor) -> Tensor:
        is_back = role == "gradient"
        stored = matrices.transpose(1, 2) if is_back else matrices
        rounded = self.weight.of(stored, in_training=is_back or torch.is_grad_enabled())
        return self.plain.multiply(role, rows, rounded.transpose(1, 2) if is_back else rounded, sizes)
