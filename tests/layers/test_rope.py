"""Rotary positions against transformers' frequencies and against rotation matrices."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalite.config.schema import RopeConfig, RopeScaling
from megalite.layers.rope import frequencies, rotate, rotation
from tests.layers.parity import draw

HEAD_DIM = 64

FREQUENCY_TOLERANCE = 1e-6
"""Relative, fp32: the blend of llama3 is written in another order."""

TURN_TOLERANCE = 1e-6
"""cos and sin are fp32 numbers by definition, also in a float64 stream."""

SCORE_TOLERANCE = 1e-5
"""Angles are fp32 too: at position 57 they are off by up to 4e-6."""

SCALINGS = {
    "linear": RopeScaling(type="linear", factor=4.0),
    "llama3": RopeScaling(type="llama3"),
    "llama3, short": RopeScaling(
        type="llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0, original_max_positions=1024
    ),
    "yarn": RopeScaling(type="yarn", factor=16.0, original_max_positions=4096),
    "yarn, own ramp": RopeScaling(
        type="yarn", factor=4.0, original_max_positions=512, beta_fast=8.0, beta_slow=2.0, truncate=False
    ),
    "yarn, no sharper": RopeScaling(type="yarn", factor=0.5, original_max_positions=512, attention_factor=1.25),
    "longrope": RopeScaling(
        type="longrope",
        factor=32.0,
        original_max_positions=4096,
        short_factor=tuple(1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)),
        long_factor=tuple(1.0 + pair for pair in range(HEAD_DIM // 2)),
    ),
}


KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"),
}


def transformers_frequencies(theta: float, scaling: RopeScaling, seq_len: int | None) -> tuple[torch.Tensor, float]:
    parameters = {
        "rope_type": scaling.type,
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        "attention_factor": scaling.attention_factor,
        "short_factor": list(scaling.short_factor),
        "long_factor": list(scaling.long_factor),
    }
    parameters = {key: parameters[key] for key in ("rope_type", "rope_theta", *KEYS[scaling.type])}
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=int(scaling.original_max_positions * scaling.factor),
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[scaling.type](config, "cpu", seq_len=seq_len)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name, theta):
    """Each form gives the frequencies and the factor that Hugging Face computes from the same settings, longrope for
    documents of either length."""
    scaling = SCALINGS[name]
    found = frequencies(RopeConfig(theta=theta, scaling=scaling), HEAD_DIM)
    for seq_len, numbers in ((None, found.usual), (scaling.original_max_positions + 1, found.long)):
        if numbers is None:
            continue
        expected, factor = transformers_frequencies(theta, scaling, seq_len)
        torch.testing.assert_close(numbers, expected, rtol=FREQUENCY_TOLERANCE, atol=0.0)
        assert found.factor == pytest.approx(factor, rel=1e-12)
    assert not torch.equal(found.usual, frequencies(RopeConfig(theta=theta), HEAD_DIM).usual)
    assert (found.long is not None) == (scaling.type == "longrope")


def test_long_documents_have_frequencies_of_their_own():
    """Each token turns by those of its document's length, and by the factor."""
    found = frequencies(RopeConfig(scaling=SCALINGS["longrope"]), HEAD_DIM)
    lengths = torch.tensor([4096, 4097, 10])
    cos, sin = rotation(torch.tensor([7, 7, 7]), found, lengths)
    for place, inv_freq in enumerate((found.usual, found.long, found.usual)):
        assert torch.equal(cos[place, 0], (7 * inv_freq).cos() * found.factor)
        assert torch.equal(sin[place, 0], (7 * inv_freq).sin() * found.factor)


def test_plain_frequencies_are_powers_of_theta():
    """Pair i of r/2 turns by theta^(-2i/r) a position, r being the rotated part of the head."""
    for fraction, rotated in ((1.0, 64), (0.25, 16), (0.5, 32)):
        found = frequencies(RopeConfig(theta=10000.0, fraction=fraction), HEAD_DIM)
        expected = torch.tensor([10000.0 ** (-2 * pair / rotated) for pair in range(rotated // 2)])
        torch.testing.assert_close(found.usual, expected, rtol=FREQUENCY_TOLERANCE, atol=0.0)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_rotation_is_a_turn_of_pairs(fraction):
    """Channels i and i + r/2 turn together by position x frequency; channels past r stay bit-equal."""
    x = draw((5, 3, HEAD_DIM), torch.float64, 0)
    positions = torch.tensor([0, 1, 2, 100, 1000])
    inv_freq = frequencies(RopeConfig(fraction=fraction), HEAD_DIM)
    y = rotate(x, rotation(positions, inv_freq))
    inv_freq = inv_freq.usual
    half = len(inv_freq)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    angles = (positions.float().unsqueeze(1) * inv_freq).double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)
    torch.testing.assert_close(y, expected, rtol=0.0, atol=TURN_TOLERANCE)
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])
    assert torch.equal(y[0], x[0])


def test_scores_depend_on_the_distance_only():
    """The product of a rotated query and a rotated key is that of any other pair of positions as far apart."""
    q, k = draw((1, 1, HEAD_DIM), torch.float64, 1), draw((1, 1, HEAD_DIM), torch.float64, 2)
    inv_freq = frequencies(RopeConfig(), HEAD_DIM)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turn_q, turn_k = (rotation(torch.tensor([position]), inv_freq) for position in (query_position, key_position))
        return (rotate(q, turn_q) * rotate(k, turn_k)).sum()

    scale = score(7, 3).abs()
    for shift in (1, 10, 50):
        assert (score(7 + shift, 3 + shift) - score(7, 3)).abs() < SCORE_TOLERANCE * max(1.0, scale)


def test_a_bf16_stream_is_rotated_in_fp32():
    """A bf16 head at a far position is turned in fp32 and rounded once: angles in bf16 would be whole turns off."""
    x = draw((1, 1, HEAD_DIM), torch.bfloat16, 0)
    turn = rotation(torch.tensor([30001]), frequencies(RopeConfig(), HEAD_DIM))
    assert turn[0].dtype == torch.float32
    y = rotate(x, turn)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rotate(x.float(), turn).bfloat16())
