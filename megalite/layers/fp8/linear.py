"""One linear layer in FP8: its three products, and the scales of what goes into them.

    forward    y  = x w^T      x [t, in] as activation,          w [out, in] as weight
    backward   dx = dy w       dy [t, out] as gradient,          w^T [in, out] as weight
               dw = dy^T x     dy^T [out, t] as gradient,        x^T [in, t] as activation

A scale is always that of the whole tensor, row or block of the model, never of one rank's part: where tensor
parallelism cuts the dim that a scale spans, maxima are compared over tp. All layouts therefore round alike.

Weights are rounded at their first use in a step and kept until the step ends; they are not kept where they themselves
are gathered for each use, nor outside training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layers.fp8.history import Histories
from megalite.layers.fp8.products import Product
from megalite.layers.fp8.quantise import ONE_BY_ONE, WHOLE, Passes, Quantised, Tile, scale_of
from megalite.layers.fp8.recipes import Recipe, Role
from megalite.layers.weight_gradients import WeightGradient, WholeGradient
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import all_reduce


@dataclass(frozen=True)
class WeightSharding:
    """Where a layer stands among the tensor-parallel ranks."""

    tp: Axis
    weight_cut: int
    """The dim of the weight that tp divides: 0 in a column-parallel layer, 1 in a row-parallel one."""

    def cut(self, role: Role) -> int | None:
        """The dim that tp divides of the activation `[t, in]`, the weight `[out, in]` or the gradient `[t, out]`."""
        if role == "weight":
            return self.weight_cut
        return 1 if (role == "activation") == (self.weight_cut == 1) else None


class Scales(Protocol):
    """Where the scales of a layer's tensors come from."""

    passes: Passes
    """What matrices are looked at and rounded with."""

    def __call__(self, role: Role, x: Tensor, *, transposed: bool) -> Tensor:
        """The scale of each tile of `x [m, k]`, fp32 `[m/r, k/c]`; transposed: x is that of the table above."""
        ...


class CurrentScales:
    """Scales from the maxima of the tensor at hand, the same on all tensor-parallel ranks."""

    def __init__(self, recipe: Recipe, place: WeightSharding, passes: Passes = ONE_BY_ONE):
        self._recipe, self._place, self.passes = recipe, place, passes

    def __call__(self, role: Role, x: Tensor, *, transposed: bool) -> Tensor:
        tile = self._recipe.tiles[role]
        amax = self.passes.amax(x, tile)
        if self._spans_ranks(role, tile, transposed):
            all_reduce(amax, self._place.tp, dist.ReduceOp.MAX)
        return scale_of(amax, self._recipe.formats[role], power_of_two=self._recipe.power_of_two)

    def _spans_ranks(self, role: Role, tile: Tile, transposed: bool) -> bool:
        cut = self._place.cut(role)
        return cut is not None and tile[1 - cut if transposed else cut] is None


class DelayedScales:
    """Scales from the maxima of former steps; the present one is recorded while training."""

    def __init__(self, histories: Histories, layer: int, current: CurrentScales):
        self._histories, self._layer, self._current = histories, layer, current
        self.passes = current.passes

    def __call__(self, role: Role, x: Tensor, *, transposed: bool) -> Tensor:
        if role == "gradient" or torch.is_grad_enabled():
            self._histories.record(self._layer, role, self.passes.amax(x, WHOLE))
        if not self._histories.is_known[self._layer]:
            return self._current(role, x, transposed=transposed)
        return self._histories.scale_of(self._layer, role)


class Fp8Linear:
    """A linear layer's products in FP8, as `layers.gemm.LinearGemm`.

    Args:
        recipe: tiles and formats.
        scales: where scales come from.
        multiply: the backend.
        keep_weights: keep the rounded weight until the step ends.
    """

    has_gradients = True

    def __init__(self, recipe: Recipe, scales: Scales, multiply: Product, *, keep_weights: bool):
        self.recipe, self.multiply = recipe, multiply
        self._scales, self._keep_weights = scales, keep_weights
        self.hand_over: Callable[[WeightGradient], None] | None = None
        self._kept: dict[bool, Quantised] = {}

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients."""
        activation = self.quantise("activation", x)
        rounded = self.quantised_weight(weight, transposed=False, keep=torch.is_grad_enabled())
        return _Fp8Product.apply(x, weight, self, activation, rounded)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of `x` and `weight`, from that of the product `grad [t, out]`."""
        rounded = self.quantise("gradient", grad)
        kept = self.transpose("activation", x, self.quantise("activation", x))
        grad_x = self.input_gradient(rounded, weight, x.dtype)
        return grad_x, self.weight_gradient(grad, rounded, kept, weight.dtype)

    def input_gradient(self, rounded: Quantised, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """dx, from the rounded dy."""
        right = self.quantised_weight(weight, transposed=True, keep=True)
        return self.multiply(rounded, right, dtype, is_forward=False)

    def weight_gradient(self, grad: Tensor, rounded: Quantised, kept: Quantised, dtype: torch.dtype) -> Tensor | None:
        """dw, from dy, the same rounded, and the rounded x^T; None when it is handed over."""

        def make() -> Tensor:
            return self.multiply(self.transpose("gradient", grad, rounded), kept, dtype, is_forward=False)

        if self.hand_over is None:
            return make()
        self.hand_over(WholeGradient(make))
        return None

    def quantise(self, role: Role, x: Tensor, *, transposed: bool = False) -> Quantised:
        """Round a matrix `[m, k]` that is to be reduced over k."""
        tile = self.recipe.tiles[role]
        scale = self._scales(role, x, transposed=transposed)
        return self._scales.passes.cast(x, scale, tile, self.recipe.formats[role])

    def transpose(self, role: Role, x: Tensor, rounded: Quantised) -> Quantised:
        """`x.T` rounded: as x already is, or anew where other numbers share a scale."""
        return rounded.t() if self.recipe.is_symmetric(role) else self.quantise(role, x.t(), transposed=True)

    def quantised_weight(self, weight: Tensor, *, transposed: bool, keep: bool) -> Quantised:
        """The rounded weight, or its transpose: that of this step where it was kept."""
        if transposed in self._kept:
            return self._kept[transposed]
        if transposed and self.recipe.is_symmetric("weight"):
            return self.quantised_weight(weight, transposed=False, keep=keep).t()
        matrix = weight.detach().t() if transposed else weight.detach()
        rounded = self.quantise("weight", matrix, transposed=transposed)
        if keep and self._keep_weights:
            self._kept[transposed] = rounded
        return rounded

    def forget_weights(self) -> None:
        """Drop what was kept."""
        self._kept.clear()


class _Fp8Product(torch.autograd.Function):
    """The three products; gradients pass through the rounding as if it were not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Linear, left: Quantised, right: Quantised) -> Tensor:
        ctx.layer, ctx.x_dtype, ctx.tile = layer, x.dtype, None
        if ctx.needs_input_grad[1]:
            kept = layer.transpose("activation", x, left)
            ctx.save_for_backward(weight, kept.data, kept.inverse)
            ctx.tile = kept.tile
        else:
            ctx.save_for_backward(weight)
        return layer.multiply(left, right, x.dtype, is_forward=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Fp8Linear = ctx.layer
        weight, *kept = ctx.saved_tensors
        rounded = layer.quantise("gradient", grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = layer.input_gradient(rounded, weight, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = layer.weight_gradient(grad, rounded, Quantised(kept[0], kept[1], ctx.tile), weight.dtype)
        return grad_x, grad_weight, None, None, None
