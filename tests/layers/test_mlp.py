"""The MLP cut over ranks against the whole one, and its activations against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.layers.mlp import ACTIVATIONS, MLP, swiglu
from tests.layers.parity import (
    NUM_TOKENS,
    Case,
    assert_equal_to_one_process,
    columns,
    complaints,
    draw,
    fused_rows,
    rows,
    whole,
)
from tests.layers.small import small_model

WIDTH, FFN = 16, 24

FORMULA_TOLERANCE = 1e-12
"""float64, the same formula."""


def case(activation: str, bias: str) -> Case:
    model = small_model(hidden_size=WIDTH, ffn_hidden_size=FFN, activation=activation, bias=bias)
    expand = "gate_up" if activation == "swiglu" else "up"
    expand_cut = fused_rows(FFN, FFN) if activation == "swiglu" else rows
    return Case(
        build=lambda axis, sp: MLP(model, tp=axis, sequence_parallel=sp),
        cuts={
            f"{expand}.weight": expand_cut,
            f"{expand}.bias": expand_cut,
            "down.weight": columns,
            "down.bias": whole,
        },
        input_shape=(NUM_TOKENS, WIDTH),
        output_shape=(NUM_TOKENS, WIDTH),
    )


CASES = {f"{activation}, bias {bias}": case(activation, bias) for activation in ACTIVATIONS for bias in ("none", "all")}


def check() -> list[str]:
    return complaints(CASES)


@pytest.mark.parametrize("world_size", [2, 4])
def test_mlp_equals_one_process(world_size):
    """Output and all gradients are those of the whole MLP for every activation: a gated one is cut per half, so that
    each rank has the gate and the up of the same channels."""
    assert_equal_to_one_process(check, world_size)


def test_activations_are_their_formulas():
    """swiglu is silu of the first half times the second, gelu the exact one by erf, gelu_tanh GPT-2's approximation."""
    x = draw((NUM_TOKENS, 10), torch.float64, 0)
    gate, up = x[:, :5], x[:, 5:]
    tolerance = {"rtol": 0.0, "atol": FORMULA_TOLERANCE}
    torch.testing.assert_close(swiglu(x), gate / (1 + torch.exp(-gate)) * up, **tolerance)
    exact = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), exact, **tolerance)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(ACTIVATIONS["gelu_tanh"](x), 0.5 * x * (1 + torch.tanh(inner)), **tolerance)
