"""The rotation of a block's queries and keys.

A projection `[t, n + 2 m, d]` holds the heads of queries, keys and values. Rotated, they come apart, and in the
backward pass their gradients come together again: one pass over memory each way. The compiler makes the way back as it
makes any tensor that is put together, each part asking for what all of them need, in 2.6 times the time that memory
takes. Where Triton is there, a kernel of ours reads and writes each number once.

Legend: t tokens, n query heads and m key and value heads, d channels of a head, r rotated ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.architecture.architecture import AttentionSpec
from megalite.layers.documents import Documents
from megalite.layers.own_kernels import takes_own_kernels
from megalite.layers.rope import Rotation, rotate


class Turn:
    """Rotates heads as a block's description says; leaves them alone where positions are none of its business."""

    def __init__(self, spec: AttentionSpec):
        self.rope, self._is_own = spec.rope, spec.has_own_rope

    def __call__(self, heads: Tensor, documents: Documents) -> Tensor:
        """`[t, any, d]` -> the same shape, t being all tokens of `documents`."""
        if self.rope is None:
            return heads
        return rotate(heads, self._rotation(documents), interleaved=self.rope.interleaved)

    def take_apart(
        self, heads: Tensor, documents: Documents, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[t, n, d]` and keys `[t, m, d]`, and values `[t, m, d]`, of `[t, n + 2 m, d]`."""
        if self.rope is not None and self._is_for_kernel(heads, rotation := self._rotation(documents)):
            return turn_apart(heads, *rotation, num_heads)
        queries_and_keys, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q, k = self(queries_and_keys, documents).split((num_heads, num_kv_heads), dim=1)
        if self.rope is not None:
            v = v.contiguous()  # else the view would keep the whole projection until the backward pass
        return q, k, v

    def _rotation(self, documents: Documents) -> Rotation:
        turn = documents.sliding_rotation if self._is_own else documents.rotation
        assert turn is not None, "the stage turns the stream once a pass"
        return turn

    def _is_for_kernel(self, heads: Tensor, rotation: Rotation) -> bool:
        """Whole heads, whose halves are pairs."""
        assert self.rope is not None
        is_whole = 2 * rotation[0].shape[2] == heads.shape[2] and not self.rope.interleaved
        return is_whole and takes_own_kernels(heads)


@torch.library.custom_op("megalite::turn_apart", mutates_args=())
def turn_apart(heads: Tensor, cos: Tensor, sin: Tensor, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Turn.take_apart`; all channels are rotated."""
    num_kv = (heads.shape[1] - num_queries) // 2
    q, k, v = heads.split((num_queries, num_kv, num_kv), dim=1)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), v.clone()  # never a view


@turn_apart.register_fake
def _(heads: Tensor, cos: Tensor, sin: Tensor, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, num, width = heads.shape
    num_kv = (num - num_queries) // 2
    q, k, v = (heads.new_empty(tokens, each, width) for each in (num_queries, num_kv, num_kv))
    return q, k, v


@turn_apart.register_kernel("cuda")
def _(heads: Tensor, cos: Tensor, sin: Tensor, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    from megalite.layers.triton_kernels import launch_turn_apart

    return launch_turn_apart(heads, cos, sin, num_queries)


@torch.library.custom_op("megalite::turn_together", mutates_args=())
def turn_together(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the projection `[t, n + 2 m, d]`: turned back."""
    return torch.cat((rotate(grad_q, (cos, -sin)), rotate(grad_k, (cos, -sin)), grad_v), dim=1)


@turn_together.register_fake
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return grad_q.new_empty(grad_q.shape[0], grad_q.shape[1] + 2 * grad_k.shape[1], grad_q.shape[2])


@turn_together.register_kernel("cuda")
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from megalite.layers.triton_kernels import launch_turn_together

    return launch_turn_together((grad_q, grad_k, grad_v), cos, sin)


def _keep_rotation(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _turn_back(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return turn_together(*grads, *ctx.saved_tensors), None, None, None


turn_apart.register_autograd(_turn_back, setup_context=_keep_rotation)
