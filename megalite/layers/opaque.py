"""Products inside compiled graphs, as ops that the compiler passes on untouched.

    forward    y      = product(x, weight, number)
    backward   dx, dw = product_gradients(dy, x, weight, number)
               dx     = input_gradient(dy, x, weight, number)       where the layer hands dw to somebody itself

What outlives a pass, is measured in one step of a hundred, waits to be made or changes between steps would end a graph,
or have every block compiled anew. So the graph knows the layer's number alone, and the op asks the layer. The number is
a tensor in host memory: a Python number would be compiled in, and no two layers could share a graph.

The price: what a layer does is not fused with what comes before, and FP8 rounds inputs again in the backward pass,
since what an op hands on must not depend on how its layer multiplies just now.

Legend: `x [t, in]`, `weight [out, in]`, `y` and `dy [t, out]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class OpaqueLayer(Protocol):
    """A layer that multiplies without autograd, in its present way."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """y. Gradients are wanted where they are enabled, but by `gradients`."""
        ...

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """dx and dw; None for a dw that the layer has handed to somebody else."""
        ...


LayerT = TypeVar("LayerT")

_numbers = itertools.count()
_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""An op of torch takes no objects but tensors."""


def number_of(layer: object) -> Tensor:
    """A number by which an op finds the layer as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number)


def layer_of(number: Tensor, kind: type[LayerT]) -> LayerT:
    """The layer of a number."""
    found = _layers[int(number)]
    assert isinstance(found, kind)
    return found


def own_copies(*operands: Tensor) -> tuple[Tensor, ...]:
    """What an op may keep of its operands: copies where the compiler writes over them."""
    return operands if _lends_operands else tuple(operand.clone() for operand in operands)


_lends_operands = True
"""Whether an op's operands are the compiler's again when it returns, to write over."""


@contextmanager
def keeping_operands() -> Iterator[None]:
    """Within it layers may keep what they multiply: ops give them copies."""
    global _lends_operands
    before, _lends_operands = _lends_operands, False
    try:
        yield
    finally:
        _lends_operands = before


def linear(x: Tensor, weight: Tensor, number: Tensor, *, hands_over: bool, num_rows: int | None = None) -> Tensor:
    """The product of a layer, with gradients.

    Args:
        hands_over: the layer hands weight gradients to somebody itself.
        num_rows: that the layer puts out, where these are not x's.
    """
    return _product(
        x, weight, number, torch.is_grad_enabled(), hands_over, x.shape[0] if num_rows is None else num_rows
    )


@torch.library.custom_op("megalite::product", mutates_args=())
def _product(x: Tensor, weight: Tensor, number: Tensor, is_training: bool, hands_over: bool, num_rows: int) -> Tensor:
    with torch.set_grad_enabled(is_training):
        return _layers[int(number)].product(x.detach(), weight.detach())


@_product.register_fake
def _(x: Tensor, weight: Tensor, number: Tensor, is_training: bool, hands_over: bool, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, weight.shape[0])


@torch.library.custom_op("megalite::product_gradients", mutates_args=())
def _gradients(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _layers[int(number)].gradients(grad, x, weight)
    assert grad_weight is not None, "it was handed over"
    return grad_x.contiguous(), grad_weight.contiguous()


@_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.custom_op("megalite::input_gradient", mutates_args=())
def _input_gradient(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    grad, x = own_copies(grad, x)
    grad_x, grad_weight = _layers[int(number)].gradients(grad, x, weight)
    assert grad_weight is None, "nobody would get it"
    return grad_x.contiguous()


@_input_gradient.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.hands_over = inputs[4]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.hands_over:
        return _input_gradient(grad, *ctx.saved_tensors), None, None, None, None, None
    return *_gradients(grad, *ctx.saved_tensors), None, None, None, None


_product.register_autograd(_backward, setup_context=_keep_inputs)


def gathered_linear(x: Tensor, weight: Tensor, number: Tensor, size: int) -> Tensor:
    """The product of a layer that brings the rows of all ranks together, with gradients: `[t/n, in]` -> `[t, out]`. It
    hands weight gradients to somebody itself."""
    return _gathered_product(x, weight, number, size)[0]


@torch.library.custom_op("megalite::gathered_product", mutates_args=())
def _gathered_product(x: Tensor, weight: Tensor, number: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return _layers[int(number)].product_of_gathered(x.detach(), weight.detach())


@_gathered_product.register_fake
def _(x: Tensor, weight: Tensor, number: Tensor, size: int) -> tuple[Tensor, Tensor]:
    rows = size * x.shape[0]
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, x.shape[1])


@torch.library.custom_op("megalite::scattered_gradient", mutates_args=())
def _scattered_gradient(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, size: int) -> Tensor:
    grad, x = own_copies(grad, x)
    return _layers[int(number)].gradients(grad, x, weight)[0]


@_scattered_gradient.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, size: int) -> Tensor:
    return x.new_empty(x.shape[0] // size, x.shape[1])


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, number, ctx.size = inputs
    ctx.save_for_backward(output[1], weight, number)
    ctx.mark_non_differentiable(output[1])


def _backward_of_gathered(ctx: Any, grad: Tensor, of_gathered: Tensor) -> tuple[Tensor | None, ...]:
    return _scattered_gradient(grad, *ctx.saved_tensors, ctx.size), None, None, None


_gathered_product.register_autograd(_backward_of_gathered, setup_context=_keep_gathered)
