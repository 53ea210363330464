"""Presets are the published architectures, to the parameter."""

from __future__ import annotations

import pytest

from megalite.architecture.costs import count_parameters
from megalite.config.fill import fill_model
from megalite.config.plan import make_plan
from megalite.config.presets import PRESETS
from megalite.config.schema import BatchConfig, Config, ModelConfig
from megalite.config.validate import validate

PUBLISHED = {
    "llama-15m": 15_191_712,
    "llama-1b3": 1_345_423_360,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-70b": 70_553_706_496,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "neox-160m": 162_322_944,
    "neox-20b": 20_554_567_680,
}
"""Parameters that the published models have; presets without a vocabulary are counted with 32000 tokens."""


def preset_config(name: str) -> Config:
    model = {"preset": name, "vocab_size": PRESETS[name].model.get("vocab_size", 32000)}
    return Config(model=model, train={"steps": 1})


@pytest.mark.parametrize("name", PRESETS)
def test_valid(name: str):
    """Every preset can be trained as it is."""
    validate(preset_config(name), 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count(name: str):
    assert make_plan(preset_config(name), 1).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", set(PRESETS) - set(PUBLISHED))
def test_the_others_are_ours(name: str):
    """Those without a published model are near the size in their name, with the vocabulary their text states."""
    sizes = {"llama-debug": (0, 0.1e6), "llama-125m": (50304, 124e6), "llama-350m": (32000, 374e6)}
    vocab_size, expected = sizes[name]
    config = Config(model={"preset": name, "vocab_size": vocab_size or 1}, train={"steps": 1})
    assert make_plan(config, 1).num_parameters == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-8b", {"num_kv_heads": 8, "ffn_hidden_size": 14336, "norm_eps": 1e-5, "max_positions": 8192}),
        ("llama-70b", {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}),
        ("mistral-7b", {"sliding_window": 4096, "max_positions": 32768}),
        ("qwen3-8b", {"qk_norm": True, "head_dim": 128, "norm_eps": 1e-6, "tie_embeddings": False, "bias": "none"}),
        ("qwen3-0.6b", {"qk_norm": True, "head_dim": 128, "tie_embeddings": True}),
        ("qwen2-7b", {"bias": "qkv", "num_kv_heads": 4, "norm_eps": 1e-6}),
        ("deepseek-v3", {"num_heads": 128, "head_dim": None, "norm_eps": 1e-6, "bias": "none"}),
        (
            "gpt-oss-20b",
            {"attention_sinks": True, "bias": "all", "sliding_window": 128, "activation": "swiglu_clamped"},
        ),
        ("gpt2", {"positions": "learned", "max_positions": 1024, "norm": "layernorm", "activation": "gelu_tanh"}),
        ("gpt2-xl", {"bias": "all", "tie_embeddings": True, "num_heads": 25}),
        ("neox-20b", {"bias": "all", "norm": "layernorm", "activation": "gelu", "tie_embeddings": False}),
    ],
)
def test_published_choices(name: str, expected: dict):
    model = ModelConfig(preset=name)
    assert {key: getattr(model, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "theta", "fraction"),
    [("llama-8b", 5e5, 1.0), ("llama2-7b", 1e4, 1.0), ("qwen3-8b", 1e6, 1.0), ("neox-160m", 1e4, 0.25)],
)
def test_published_rotary_settings(name: str, theta: float, fraction: float):
    rope = ModelConfig(preset=name).rope
    assert (rope.theta, rope.fraction, rope.scaling) == (theta, fraction, None)


def test_debug_preset_is_grouped():
    """The debug model has fewer kv heads than heads, so that it exercises what large models have."""
    model = ModelConfig(preset="llama-debug")
    assert model.num_kv_heads < model.num_heads
    assert count_parameters(fill_model(model, BatchConfig(), 1)) < 150_000
