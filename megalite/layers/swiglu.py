"""SwiGLU (Shazeer 2020), `silu(gate) * up`, with its gradient as one pass over memory on a GPU.

    h = g sigmoid(g) u        dg = dh u (s + g s (1 - s))        du = dh g s        s = sigmoid(g)

The gradients of gate and up are the two halves of one tensor. The compiler makes them as it makes any tensor that is
put together, each half asking for all that both need, which takes 1.5 to 2.4 times as long as memory does. Where Triton
is there, one kernel reads each number once. The forward pass is the compiler's own: it is made again in the backward
pass instead of being kept.

Legend: t tokens, f the MLP's width; `x [t, 2f]` holds gate, then up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.layers.own_kernels import takes_own_kernels


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, with the gradients that autograd makes."""
    return F.silu(gate) * up


def swiglu_of(x: Tensor) -> Tensor:
    """`[t, 2f]` -> `[t, f]`."""
    if torch.compiler.is_compiling() and takes_own_kernels(x):
        return OneKernelSwiglu.apply(x)
    return swiglu(*x.chunk(2, dim=-1))


class OneKernelSwiglu(torch.autograd.Function):
    """The same, whose gradient is an op of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return swiglu(*x.chunk(2, dim=-1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return swiglu_gradient(grad, x)


@torch.library.custom_op("megalite::swiglu_gradient", mutates_args=())
def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """That of `x [t, 2f]`, from that of the product `[t, f]`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    (gate, up), grad = x.to(wide).chunk(2, dim=-1), grad.to(wide)
    share = torch.sigmoid(gate)
    passed = gate * share
    return torch.cat((grad * up * (share + passed * (1 - share)), grad * passed), dim=-1).to(x.dtype)


@swiglu_gradient.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@swiglu_gradient.register_kernel("cuda")
def _(grad: Tensor, x: Tensor) -> Tensor:
    from megalite.layers.triton_kernels import launch_swiglu_gradient

    return launch_swiglu_gradient(grad, x)
