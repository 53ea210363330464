"""Models by name: the sizes, norms and position settings that published models have.

A preset is the `model` section of a config, as plain data. What it leaves out keeps the schema's default; what a config
gives beside it wins. Only the architecture is taken over: dropout and the stretching of rotary positions that some
models gained after pretraining are left to the user. Presets without a `vocab_size` take the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """A named architecture."""

    about: str
    """What it is, and where its numbers were published."""
    model: Mapping[str, Any]
    """Keys of the config's `model` section."""


def _llama(hidden: int, layers: int, heads: int, ffn: int, **rest: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "ffn_hidden_size": ffn}
    return {"norm_eps": 1e-5, **sizes, **rest}


def _llama3(hidden: int, layers: int, heads: int, ffn: int, **rest: Any) -> dict[str, Any]:
    common = {"num_kv_heads": 8, "vocab_size": 128256, "max_positions": 8192, "rope": {"theta": 500000.0}}
    return _llama(hidden, layers, heads, ffn, **common, **rest)


def _qwen(hidden: int, layers: int, heads: int, ffn: int, **rest: Any) -> dict[str, Any]:
    return _llama(hidden, layers, heads, ffn, norm_eps=1e-6, rope={"theta": 1000000.0}, **rest)


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, **rest: Any) -> dict[str, Any]:
    attention = {"num_kv_heads": 8, "head_dim": 128, "qk_norm": True}
    sizes = {"vocab_size": 151936, "max_positions": 40960}
    return _qwen(hidden, layers, heads, ffn, **{**sizes, **attention, **rest})


def _deepseek(hidden: int, layers: int, heads: int, ffn: int, moe: dict[str, Any], **rest: Any) -> dict[str, Any]:
    common = {"norm_eps": 1e-6, "rope": {"interleaved": True}, "max_positions": 4096}
    return _llama(hidden, layers, heads, ffn, **{**common, "moe": moe, **rest})


def _gpt_oss(layers: int, num_experts: int) -> dict[str, Any]:
    attention = {"num_kv_heads": 8, "head_dim": 64, "attention_sinks": True, "sliding_window": 128}
    experts = {"num_experts": num_experts, "top_k": 4, "logit_bias": True, "aux_loss": 0.0036}
    return _llama(
        2880,
        layers,
        64,
        2880,
        **attention,
        layer_types=["sliding_attention", "full_attention"],
        activation="swiglu_clamped",
        bias="all",
        vocab_size=201088,
        max_positions=4096,
        rope={"theta": 150000.0},
        moe=experts,
    )


def _gpt(hidden: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "ffn_hidden_size": 4 * hidden}
    return {**sizes, "norm": "layernorm", "norm_eps": 1e-5, "bias": "all", **rest}


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    embeddings = {"vocab_size": 50257, "positions": "learned", "max_positions": 1024, "tie_embeddings": True}
    return _gpt(hidden, layers, heads, activation="gelu_tanh", **embeddings)


def _neox(hidden: int, layers: int, heads: int, vocab_size: int) -> dict[str, Any]:
    rope = {"theta": 10000.0, "fraction": 0.25}
    return _gpt(hidden, layers, heads, activation="gelu", vocab_size=vocab_size, max_positions=2048, rope=rope)


PRESETS: dict[str, Preset] = {
    "llama-debug": Preset("0.1M beside the embedding, for tests", _llama(64, 2, 4, 192, num_kv_heads=2)),
    "llama-15m": Preset("15M with 32k tokens (llama2.c, stories15M)", _llama(288, 6, 6, 768, tie_embeddings=True)),
    "llama-125m": Preset(
        "124M with 50k tokens: GPT-3 Small's width and depth", _llama(768, 12, 12, 2048, tie_embeddings=True)
    ),
    "llama-350m": Preset("374M with 32k tokens: GPT-3 Medium's width and depth", _llama(1024, 24, 16, 2816)),
    "llama-1b3": Preset("1.3B with 32k tokens (Sheared-LLaMA 1.3B, Xia et al. 2023)", _llama(2048, 24, 16, 5504)),
    "llama-3b": Preset(
        "3.2B: Llama 3.2 3B without its rotary scaling", _llama3(3072, 28, 24, 8192, tie_embeddings=True)
    ),
    "llama-8b": Preset("8.0B: Llama 3 8B (Llama team 2024)", _llama3(4096, 32, 32, 14336)),
    "llama-13b": Preset("13.0B with 32k tokens: Llama 2 13B", _llama(5120, 40, 40, 13824, max_positions=4096)),
    "llama-70b": Preset("70.6B: Llama 3 70B (Llama team 2024)", _llama3(8192, 80, 64, 28672)),
    "llama2-7b": Preset(
        "6.7B: Llama 2 7B (Touvron et al. 2023)", _llama(4096, 32, 32, 11008, vocab_size=32000, max_positions=4096)
    ),
    "mistral-7b": Preset(
        "7.2B: Mistral 7B v0.1 with its sliding window (Jiang et al. 2023)",
        _llama(4096, 32, 32, 14336, num_kv_heads=8, vocab_size=32000, max_positions=32768, sliding_window=4096),
    ),
    "qwen2-7b": Preset(
        "7.6B: Qwen2 7B, biases on query, key and value (Qwen team 2024)",
        _qwen(3584, 28, 28, 18944, num_kv_heads=4, bias="qkv", vocab_size=152064, max_positions=131072),
    ),
    "qwen3-0.6b": Preset(
        "0.6B: Qwen3 0.6B, normalised query and key heads (Qwen team 2025)",
        _qwen3(1024, 28, 16, 3072, tie_embeddings=True),
    ),
    "qwen3-8b": Preset("8.2B: Qwen3 8B (Qwen team 2025)", _qwen3(4096, 36, 32, 12288)),
    "mixtral-8x7b": Preset(
        "46.7B, 12.9B a token: Mixtral 8x7B (Jiang et al. 2024)",
        _llama(
            4096,
            32,
            32,
            14336,
            num_kv_heads=8,
            vocab_size=32000,
            max_positions=32768,
            rope={"theta": 1000000.0},
            moe={"num_experts": 8, "top_k": 2, "aux_loss": 0.02},
        ),
    ),
    "qwen3-30b-a3b": Preset(
        "30.5B, 3.3B a token: Qwen3-30B-A3B (Qwen team 2025)",
        _qwen3(
            2048,
            48,
            32,
            6144,
            num_kv_heads=4,
            moe={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768, "aux_loss": 0.008},
        ),
    ),
    "deepseek-v2-lite": Preset(
        "15.7B, 2.7B a token: DeepSeek-V2-Lite, without its stretch of positions (DeepSeek-AI 2024)",
        _deepseek(
            2048,
            27,
            16,
            10944,
            {
                "num_experts": 64,
                "top_k": 6,
                "ffn_hidden_size": 1408,
                "shared_ffn_hidden_size": 2816,
                "normalize": False,
                "first_dense": 1,
                "aux_loss": 0.001,
                "aux_loss_over": "sequence",
            },
            vocab_size=102400,
            mla={"kv_lora_rank": 512},
        ),
    ),
    "deepseek-v3": Preset(
        "671B, 37B a token: DeepSeek-V3, without its stretch of positions (DeepSeek-AI 2024)",
        _deepseek(
            7168,
            61,
            128,
            18432,
            {
                "num_experts": 256,
                "top_k": 8,
                "ffn_hidden_size": 2048,
                "shared_ffn_hidden_size": 2048,
                "scores": "sigmoid",
                "scale": 2.5,
                "num_groups": 8,
                "top_groups": 4,
                "group_score": "sum_of_two",
                "bias_rate": 0.001,
                "aux_loss": 0.0001,
                "aux_loss_over": "sequence",
                "first_dense": 3,
            },
            vocab_size=129280,
            init_std=0.006,
            init_depth_scaling=False,
            mla={"q_lora_rank": 1536},
        ),
    ),
    "gpt-oss-20b": Preset(
        "20.9B, 3.6B a token: gpt-oss-20b, without its stretch of positions (OpenAI 2025)", _gpt_oss(24, 32)
    ),
    "gpt-oss-120b": Preset(
        "116.8B, 5.1B a token: gpt-oss-120b, without its stretch of positions (OpenAI 2025)", _gpt_oss(36, 128)
    ),
    "gpt2": Preset("124M: GPT-2 (Radford et al. 2019)", _gpt2(768, 12, 12)),
    "gpt2-xl": Preset("1.6B: GPT-2 XL (Radford et al. 2019)", _gpt2(1600, 48, 25)),
    "neox-160m": Preset(
        "162M: the sizes of Pythia 160M, attention and MLP one after the other instead of in parallel",
        _neox(768, 12, 12, 50304),
    ),
    "neox-20b": Preset(
        "20.6B: the sizes of GPT-NeoX 20B, attention and MLP one after the other instead of in parallel",
        _neox(6144, 44, 64, 50432),
    ),
}


def with_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section with its preset's keys filled in below the given ones; unknown presets add nothing."""
    name = model.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    return _laid_over(preset.model, model) if preset else dict(model)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            merged[key] = _laid_over(below[key], above[key])
    return merged
