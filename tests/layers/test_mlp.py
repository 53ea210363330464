"""The MLP cut over ranks against the whole one, and its activations against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.architecture.activations import ACTIVATIONS, is_gated
from megalite.layers.mlp import MLP, load_activation
from tests.layers.parity import (
    NUM_TOKENS,
    Case,
    assert_equal_to_one_process,
    columns,
    complaints,
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
    expand = "gate_up" if is_gated(activation) else "up"
    expand_cut = fused_rows(FFN, FFN) if is_gated(activation) else rows
    return Case(
        build=lambda axis, sp: MLP(WIDTH, model.blocks[0].feed_forward, tp=axis, sequence_parallel=sp),
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


def test_activations():
    """Each is its formula: gates are applied to the first half, the exact GELU is by erf, the other GPT-2's."""
    torch.manual_seed(0)
    x = 6 * torch.randn(5, 2 * FFN, dtype=torch.float64)
    gate, up = x[:, :FFN], x[:, FFN:]
    assert min(gate.max(), up.max(), -up.min()) > 7, "beyond gpt-oss's bounds"
    below, within = gate.clamp(max=7), up.clamp(-7, 7)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    by_erf, by_tanh = 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), 0.5 * x * (1 + torch.tanh(inner))
    wanted = {
        "swiglu": gate / (1 + torch.exp(-gate)) * up,
        "swiglu_clamped": below / (1 + torch.exp(-1.702 * below)) * (within + 1),
        "geglu": by_erf[:, :FFN] * up,
        "geglu_tanh": by_tanh[:, :FFN] * up,
        "reglu": gate.clamp(min=0) * up,
        "gelu": by_erf,
        "gelu_tanh": by_tanh,
        "silu": x / (1 + torch.exp(-x)),
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
    }
    assert list(wanted) == [name for name in ACTIVATIONS if not ACTIVATIONS.is_brought(name)]
    for name, values in wanted.items():
        torch.testing.assert_close(load_activation(name)(x), values, rtol=FORMULA_TOLERANCE, atol=FORMULA_TOLERANCE)
