"""Adapters beside a layer: `x W' + scale (x A') B'`, part by part, with gradients, and what recomputation keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.linear import ColumnParallelLinear
from megalite.layers.low_rank import AdaptedPart, LowRank
from megalite.model.recompute import choose_recompute
from megalite.parallel.axes import SINGLE
from tests.layers.tracking import LivingStorages

TOKENS, WIDTH, RANK, SCALE = 7, 6, 2, 1.5

PARTS = {
    "one": [AdaptedPart(5, True)],
    "all": [AdaptedPart(4, True), AdaptedPart(3, True)],
    "some": [AdaptedPart(3, False), AdaptedPart(4, True), AdaptedPart(2, False), AdaptedPart(6, True)],
}


def adapted_layer(parts: Sequence[AdaptedPart], width: int = WIDTH) -> ColumnParallelLinear:
    """A frozen layer of float64 with adapters, none of whose weights is zero."""
    layer = ColumnParallelLinear(width, sum(part.size for part in parts), tp=SINGLE)
    layer.lora = LowRank(width, parts, rank=RANK, scale=SCALE, tp=SINGLE, cuts_inputs=False)
    layer.double()
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.weight.requires_grad_(False)
    return layer


def by_definition(layer: ColumnParallelLinear, parts: Sequence[AdaptedPart], x: Tensor) -> Tensor:
    assert layer.lora is not None
    a, b = iter(layer.lora.a.split(RANK)), iter(layer.lora.b.split([part.size for part in parts if part.is_adapted]))
    whole = [
        weight + SCALE * next(b) @ next(a) if part.is_adapted else weight
        for part, weight in zip(parts, layer.weight.split([part.size for part in parts]), strict=True)
    ]
    return x @ torch.cat(whole).t()


@pytest.mark.parametrize("name", PARTS)
def test_outputs_and_gradients_are_those_of_the_sum(name):
    """float64; also where nothing below is trained."""
    layer = adapted_layer(PARTS[name])
    assert layer.lora is not None
    x, seen = torch.randn(TOKENS, WIDTH, dtype=torch.float64), torch.randn(TOKENS, layer.weight.shape[0]).double()
    for is_wanted in (True, False):
        x.requires_grad_(is_wanted)
        asked = [layer.lora.a, layer.lora.b, *([x] if is_wanted else [])]
        ours, plain = layer(x), by_definition(layer, PARTS[name], x)
        torch.testing.assert_close(ours, plain)
        for mine, expected in zip(
            torch.autograd.grad(ours, asked, seen), torch.autograd.grad(plain, asked, seen), strict=True
        ):
            torch.testing.assert_close(mine, expected)


def test_selective_recomputation_keeps_what_is_narrow():
    """Of adapters: what they put out is as wide as the layer's own products, and no gradient is made of it."""
    layer = adapted_layer([AdaptedPart(400, True), AdaptedPart(300, True)])
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    run = cast("Callable[[nn.Module, Tensor, None], Tensor]", choose_recompute("selective"))
    with LivingStorages() as living:
        out = run(_Alone(layer), x, None)
        kept = living.num_bytes() - out.nbytes
    torch.testing.assert_close(out, layer(x))
    narrow = TOKENS * 2 * RANK * x.itemsize
    assert out.nbytes <= kept <= out.nbytes + 2 * narrow, "the weight's own products, and what leads to B"


class _Alone(nn.Module):
    """A layer as a block."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, documents: None) -> Tensor:
        out = self.layer(x)
        assert isinstance(out, Tensor)
        return out
