"""Normalisation: whole weights whose gradients are partial sums under sequence parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite.layers.norm import AllHeadsNorm, HeadNorm, LayerNorm, RMSNorm, ZeroCenteredRMSNorm, rms_norm
from tests.layers.parity import NUM_TOKENS, Case, assert_equal_to_one_process, columns, complaints, rows, whole

WIDTH, EPS = 20, 1e-5
HEADS, HEAD_DIM = 4, 6

FLOAT64_TOLERANCE = 1e-12
"""The same formula in the same format; only torch's order of sums differs."""

CASES = {
    "RMSNorm": Case(
        build=lambda axis, sp: RMSNorm(WIDTH, EPS, tp=axis, sequence_parallel=sp),
        cuts={"weight": whole},
        input_shape=(NUM_TOKENS, WIDTH),
        output_shape=(NUM_TOKENS, WIDTH),
    ),
    "LayerNorm": Case(
        build=lambda axis, sp: LayerNorm(WIDTH, EPS, tp=axis, sequence_parallel=sp),
        cuts={"weight": whole, "bias": whole},
        input_shape=(NUM_TOKENS, WIDTH),
        output_shape=(NUM_TOKENS, WIDTH),
    ),
    "ZeroCenteredRMSNorm": Case(
        build=lambda axis, sp: ZeroCenteredRMSNorm(WIDTH, EPS, tp=axis, sequence_parallel=sp),
        cuts={"weight": whole},
        input_shape=(NUM_TOKENS, WIDTH),
        output_shape=(NUM_TOKENS, WIDTH),
    ),
    "AllHeadsNorm": Case(
        build=lambda axis, sp: AllHeadsNorm(HEADS // axis.size, HEAD_DIM, EPS, tp=axis),
        cuts={"weight": rows},
        input_shape=(NUM_TOKENS, HEADS, HEAD_DIM),
        output_shape=(NUM_TOKENS, HEADS, HEAD_DIM),
        input_cut=lambda sp: columns,
        output_cut=lambda sp: columns,
        sequence_parallel=(False,),
    ),
    "HeadNorm": Case(
        build=lambda axis, sp: HeadNorm(HEAD_DIM, EPS, tp=axis),
        cuts={"weight": whole},
        input_shape=(NUM_TOKENS, HEADS, HEAD_DIM),
        output_shape=(NUM_TOKENS, HEADS, HEAD_DIM),
        input_cut=lambda sp: columns,
        output_cut=lambda sp: columns,
        sequence_parallel=(False,),
    ),
}


def check() -> list[str]:
    return complaints(CASES)


@pytest.mark.parametrize("world_size", [2, 4])
def test_norms_equal_one_process(world_size):
    """Output and gradients are those of the whole layer: the weight's gradient on every rank is the whole sum, over
    the tokens under sequence parallelism and over the heads in a head norm."""
    assert_equal_to_one_process(check, world_size)


def test_formulas_are_torchs():
    """RMSNorm and LayerNorm are torch's own, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (NUM_TOKENS, 1, 1))
    weight, bias = weight[0], bias[0]
    rms, layer = RMSNorm(WIDTH, EPS).double(), LayerNorm(WIDTH, EPS).double()
    with torch.no_grad():
        rms.weight.copy_(weight)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    tolerance = {"rtol": 0.0, "atol": FLOAT64_TOLERANCE}
    torch.testing.assert_close(rms(x), F.rms_norm(x, (WIDTH,), weight, EPS), **tolerance)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (WIDTH,), weight, bias, EPS), **tolerance)
    centred, heads = ZeroCenteredRMSNorm(WIDTH, EPS).double(), AllHeadsNorm(4, 5, EPS).double()
    with torch.no_grad():
        centred.weight.copy_(weight - 1.0)
        heads.weight.copy_(weight)
    torch.testing.assert_close(centred(x), F.rms_norm(x, (WIDTH,), weight, EPS), **tolerance)
    torch.testing.assert_close(heads(x.view(-1, 4, 5)).flatten(1), rms(x), **tolerance)


def test_rms_is_computed_in_fp32_for_a_bf16_stream():
    """A bf16 stream is normalised in fp32 and rounded once: squares that bf16 could not add up come out right."""
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    x[0, 0] = 3.0
    y = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    expected = x.double() / (x.double().square().mean() ** 0.5)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected.to(torch.bfloat16))
