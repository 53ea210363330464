"""Queries, keys and values taken out of a projection: as one op and by kernels, against the rotation of each head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalite.layers import turn
from megalite.layers.rope import Rotation, rotate
from megalite.layers.turn import turn_apart, turn_together
from tests.kit.triton_stand_in import triton_on_a_cpu
from tests.model.stages import tiny_model

TOKENS = 5
SHAPES = {"as many": (4, 4, 8), "groups": (6, 2, 6), "one": (1, 1, 2), "many channels": (3, 1, 96)}
"""Query heads, key and value heads, and channels of a head."""

BF16_STEP = 2.0**-7
"""From a number to its neighbour, to which the other way may round."""


def drawn(num: int, num_kv: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Rotation]:
    """A projection, and angles with a factor, as some frequencies have."""
    generator = torch.Generator().manual_seed(width)
    heads = torch.randn(TOKENS, num + 2 * num_kv, width, generator=generator).to(dtype)
    angles = 6 * torch.rand(TOKENS, 1, width // 2, generator=generator)
    return heads, (1.1 * angles.cos(), 1.1 * angles.sin())


def plain(heads: Tensor, by: Rotation, num: int, num_kv: int) -> list[Tensor]:
    """The same, a part at a time."""
    q, k, v = heads.split((num, num_kv, num_kv), dim=1)
    return [rotate(q, by), rotate(k, by), v]


def with_gradient(function, heads: Tensor) -> list[Tensor]:
    """The parts, and the gradient of a sum of them that weighs every number otherwise."""
    heads = heads.clone().requires_grad_()
    parts = function(heads)
    total = torch.zeros((), dtype=heads.dtype)
    for number, part in enumerate(parts):
        weights = torch.linspace(-1, 2 + number, part.numel(), dtype=part.dtype).view(part.shape)
        total = total + (part * weights).sum()
    total.backward()
    assert heads.grad is not None
    return [*(part.detach() for part in parts), heads.grad]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_op_is_the_rotation_of_each_part(shape, compiled):
    """And its gradient autograd's, inside a compiled graph too."""
    num, num_kv, _ = shape
    heads, by = drawn(*shape, torch.float64)
    by = by[0].double(), by[1].double()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return turn_apart(x, *by, num)

    run = torch.compile(function, backend="aot_eager") if compiled else function
    for found, wanted in zip(
        with_gradient(run, heads), with_gradient(lambda x: plain(x, by, num, num_kv), heads), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_compute_what_the_ops_do(shape, dtype):
    """Of gradients that lie otherwise in memory too, as those of attention may."""
    num, num_kv, width = shape
    heads, (cos, sin) = drawn(*shape, dtype)
    tolerance = BF16_STEP if dtype == torch.bfloat16 else 1e-6
    grads = tuple(torch.randn(each, TOKENS, width).to(dtype).transpose(0, 1) for each in (num, num_kv, num_kv))
    with triton_on_a_cpu() as kernels:
        apart = kernels.launch_turn_apart(heads, cos, sin, num)
        together = kernels.launch_turn_together(grads, cos, sin)
    for found, wanted in zip(apart, turn_apart(heads, cos, sin, num), strict=True):
        assert found.is_contiguous()
        assert torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    wanted = turn_together(*grads, cos, sin)
    assert torch.allclose(together.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def test_one_token():
    """Whose heads lie in memory as a copy of them would."""
    q, k, v = turn_apart(x := torch.randn(1, 4, 8), torch.ones(1, 1, 4), torch.zeros(1, 1, 4), 2)
    assert torch.equal(torch.cat((q, k, v), dim=1), x)


def test_no_tokens():
    """A rank may have none."""
    with triton_on_a_cpu() as kernels:
        q, k, v = kernels.launch_turn_apart(torch.empty(0, 4, 8), torch.empty(0, 1, 4), torch.empty(0, 1, 4), 2)
    assert (q.shape, k.shape, v.shape) == ((0, 2, 8), (0, 1, 8), (0, 1, 8))


@pytest.mark.parametrize("more", [{}, {"interleaved": True}, {"fraction": 0.5}], ids=str)
def test_a_block_takes_the_op_where_it_may(monkeypatch, more):
    """Queries, keys and values are the same; neighbours that are pairs, and parts of heads, go the other way."""
    spec = tiny_model(num_kv_heads=2, rope=more).block(0).attention
    rotation = torch.rand(2, TOKENS, 1, int(spec.head_dim * spec.rope.fraction) // 2).unbind()
    documents = SimpleNamespace(rotation=rotation, sliding_rotation=None)
    heads = torch.randn(TOKENS, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    found = []
    for by_op in (False, True):
        monkeypatch.setattr(turn, "takes_own_kernels", lambda x, answer=by_op: answer)
        found.append(turn.Turn(spec).take_apart(heads, documents, spec.num_heads, spec.num_kv_heads))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
