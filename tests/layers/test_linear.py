"""Column- and row-parallel linear layers against the whole layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite.layers.gemm import PlainGemm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.axes import SINGLE
from tests.layers.parity import NUM_TOKENS, Case, assert_equal_to_one_process, columns, complaints, rows, whole

WIDE, NARROW = 32, 20
"""Output and input width of the column layer; both divide by 4."""


def column_case(bias: bool) -> Case:
    return Case(
        build=lambda axis, sp: ColumnParallelLinear(
            NARROW, WIDE // axis.size, tp=axis, bias=bias, sequence_parallel=sp
        ),
        cuts={"weight": rows, "bias": rows},
        input_shape=(NUM_TOKENS, NARROW),
        output_shape=(NUM_TOKENS, WIDE),
        output_cut=lambda sp: columns,
    )


def row_case(bias: bool) -> Case:
    return Case(
        build=lambda axis, sp: RowParallelLinear(WIDE // axis.size, NARROW, tp=axis, bias=bias, sequence_parallel=sp),
        cuts={"weight": columns, "bias": whole},
        input_shape=(NUM_TOKENS, WIDE),
        output_shape=(NUM_TOKENS, NARROW),
        input_cut=lambda sp: columns,
    )


CASES = {
    "column": column_case(bias=False),
    "column with bias": column_case(bias=True),
    "row": row_case(bias=False),
    "row with bias": row_case(bias=True),
}


def check() -> list[str]:
    return complaints(CASES)


@pytest.mark.parametrize("world_size", [2, 4])
def test_linear_layers_equal_one_process(world_size):
    """Output and gradients of input, weight and bias are those of the whole layer, with and without sequence
    parallelism, in float64 and float32; a row layer's bias is added once, not once a rank."""
    assert_equal_to_one_process(check, world_size)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_one_rank_is_a_plain_linear_layer(kind):
    """Over an axis of one, both layers are torch's linear function."""
    torch.manual_seed(0)
    layer = kind(NARROW, WIDE, tp=SINGLE, bias=True)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    x = torch.randn(NUM_TOKENS, NARROW)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_the_product_goes_through_the_gemm_that_is_passed(kind):
    """The precision seam is used: the layer multiplies by the given gemm alone, with its own input and weight."""
    seen = []

    class Spy(PlainGemm):
        def linear(self, x, weight):
            seen.append((tuple(x.shape), tuple(weight.shape)))
            return torch.zeros(x.shape[0], weight.shape[0])

    layer = kind(NARROW, WIDE, tp=SINGLE, gemm=Spy())
    assert layer(torch.ones(NUM_TOKENS, NARROW)).count_nonzero() == 0
    assert seen == [((NUM_TOKENS, NARROW), (WIDE, NARROW))]
