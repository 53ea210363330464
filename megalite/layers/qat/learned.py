"""Weights rounded by scales that are trained (LSQ, Esser et al. 2020): symmetric, a scale for each group of a row.

    forward    v = w / s,   q = round(v) within -n and n,   y = x (q s)^T
    backward   dx = dy (q s)
               e  = dy^T x                                  what q s has as gradient
               dw = e        where |v| <= n, else 0         straight through what is not clipped
               ds = e (q - v) where |v| <= n, else e q      summed over a group's g numbers, times 1 / sqrt(g n)

With its factor a scale's gradient is, beside the scale, about as large as those of the weights are beside these. A
scale that has fallen below 0 counts by its size.

Rounded weights are kept until a step ends, and what is handed over can wait, as with other products; dw and ds come of
one e. Where ranks have parts of ds (a row with one scale that lies on several, or other tokens of a weight that all
hold) autograd adds them up, so that ds is made at once.

Legend: x `[t, in]`, w `[out, in]`, s `[out, in/g]`, y and dy `[t, out]`.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megalite.architecture.settings import WeightScales
from megalite.layers import opaque
from megalite.layers.gemm import Gemm
from megalite.layers.qat.integers import in_scales
from megalite.layers.qat.linear import RoundedWeight
from megalite.layers.weight_gradients import SummedLinear, WholeGradient
from megalite.parallel.axes import Axis
from megalite.parallel.collectives import Collective, keep

Gradients = tuple[Tensor, Tensor | None, Tensor | None]
"""Of inputs, weight and scales; None for what is handed over."""


class LearnedRounding(nn.Module):
    """How one linear layer multiplies. Shape: `x [t, in]` and `weight [out, in]` -> `[t, out]`, with gradients.

    Args:
        shape: of the scales, on this rank.
        group: numbers of a row of the whole weight that share one.
        settings: of the model.
        tp: the tensor-parallel axis.
        share: how they enter the layer: `copy_to` where ranks have parts of their gradient.
    """

    def __init__(self, shape: tuple[int, ...], group: int, settings: WeightScales, *, tp: Axis, share: Collective):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(shape))
        self.limit, self.factor = settings.largest, 1.0 / math.sqrt(group * settings.largest)
        self.tp, self.share = tp, share
        self._number = opaque.number_of(self)

    def attach(self, plain: Gemm, weight: RoundedWeight) -> None:
        """Say what multiplies, and who keeps what is rounded.

        Args:
            plain: a `SummedLinear` has gradients handed over.
        """
        self.plain, self.weight = plain, weight
        self.hands_over = isinstance(plain, SummedLinear), isinstance(plain, SummedLinear) and self.share is keep
        """The weight's gradient, and the scales'."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = self.share(self.scale, self.tp)
        if torch.compiler.is_compiling():
            return _learned_product(x, weight, scale, self._number, torch.is_grad_enabled(), *self.hands_over)
        return _LearnedProduct.apply(x, weight, scale, self, torch.is_grad_enabled())

    def product(self, x: Tensor, weight: Tensor, scale: Tensor, *, in_training: bool) -> Tensor:
        """y."""
        return self.plain.multiply(x, self.weight.of(weight, scale, in_training=in_training))

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Gradients:
        """dx, and dw and ds where they are not handed over."""
        grad_x = self.plain.multiply(grad, self.weight.of(weight, scale, in_training=True).t())
        plain, (of_weight, of_scale) = self.plain, self.hands_over
        if isinstance(plain, SummedLinear):
            weight, scale = plain.weight, self.scale  # what a compiled graph hands on is a copy, not to be kept
        made = _ProductOfBoth(self, grad.detach(), x.detach(), weight.detach(), scale.detach())
        if isinstance(plain, SummedLinear):
            plain.take(plain.weight, WholeGradient(made.of_weight))
            if of_scale:
                plain.take(self.scale, WholeGradient(made.of_scale))
        return (
            grad_x,
            None if of_weight else made.of_weight().to(weight.dtype),
            None if of_scale else made.of_scale().to(scale.dtype),
        )


class _ProductOfBoth:
    """What dw and ds are made of, in fp32."""

    def __init__(self, layer: LearnedRounding, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor):
        self.layer, self.grad, self.x, self.weight, self.scale = layer, grad, x, weight, scale

    def of_weight(self) -> Tensor:
        """`[out, in]`."""
        return self._whole.masked_fill(self._ratio.abs() > self.layer.limit, 0.0).flatten(-2)

    def of_scale(self) -> Tensor:
        """`[out, in/g]`."""
        q = self._ratio.round().clamp_(-self.layer.limit, self.layer.limit)
        change = torch.where(self._ratio.abs() > self.layer.limit, q, q - self._ratio)
        found = (self._whole * change).sum(-1).mul_(self.layer.factor)
        return torch.where(self.scale < 0.0, -found, found)

    @cached_property
    def _ratio(self) -> Tensor:
        """v, `[out, groups, g]`."""
        return in_scales(self.weight, self.scale)[0]

    @cached_property
    def _whole(self) -> Tensor:
        """e, `[out, groups, g]`."""
        total = torch.empty(self.weight.shape, dtype=torch.float32, device=self.grad.device)
        self.layer.plain.begin_product(total, self.grad, self.x)
        return total.unflatten(-1, (self.scale.shape[-1], -1))


class _LearnedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, layer: LearnedRounding, in_training: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        ctx.layer = layer
        return layer.product(x, weight, scale, in_training=in_training)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.gradients(grad, *ctx.saved_tensors), None, None


@torch.library.custom_op("megalite::learned_product", mutates_args=())
def _learned_product(
    x: Tensor, weight: Tensor, scale: Tensor, number: Tensor, is_training: bool, of_weight: bool, of_scale: bool
) -> Tensor:
    layer = opaque.layer_of(number, LearnedRounding)
    return layer.product(x.detach(), weight.detach(), scale.detach(), in_training=is_training)


@_learned_product.register_fake
def _(
    x: Tensor, weight: Tensor, scale: Tensor, number: Tensor, is_training: bool, of_weight: bool, of_scale: bool
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("megalite::learned_gradients", mutates_args=())
def _learned_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, number: Tensor, of_weight: bool, of_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What is handed over comes back without numbers."""
    if of_weight:
        grad, x = opaque.own_copies(grad, x)
    made = opaque.layer_of(number, LearnedRounding).gradients(grad, x, weight, scale)
    grad_x, grad_weight, grad_scale = (grad.new_empty(0) if each is None else each.contiguous() for each in made)
    return grad_x, grad_weight, grad_scale


@_learned_gradients.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, number: Tensor, of_weight: bool, of_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        grad.new_empty(0) if of_weight else weight.new_empty(weight.shape),
        grad.new_empty(0) if of_scale else scale.new_empty(scale.shape),
    )


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.handed_over = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, *made = _learned_gradients(grad, *ctx.saved_tensors, *ctx.handed_over)
    kept = (None if is_taken else each for each, is_taken in zip(made, ctx.handed_over, strict=True))
    return grad_x, *kept, None, None, None, None


_learned_product.register_autograd(_backward, setup_context=_keep_inputs)
