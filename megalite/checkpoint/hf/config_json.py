"""config.json, written for every reader in use.

transformers 4 and 5 keep rotary settings, number format and NeoX's rotary fraction under different keys, and version 4
silently takes its defaults when it finds only version 5's. So both forms are written, and they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megalite.checkpoint.hf.families import Family
from megalite.checkpoint.hf.rope_json import write_rope
from megalite.config.schema import ModelConfig

FILE_NAME = "config.json"

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_GATED = {**_SIZES, "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps"}
_GPT2 = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon",
}
KEYS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _GATED),
    "gpt_neox": {**_SIZES, "norm_eps": "layer_norm_eps"},
    "gpt2": _GPT2,
}
"""For each class, field of ModelConfig -> key that has the same meaning."""

ACTIVATION_NAMES = {"swiglu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Our activation -> theirs. Theirs is the inner function of a gated MLP."""


def write_config(model: ModelConfig, family: Family, *, dtype: str, special_ids: Mapping[str, int | None]) -> dict:
    """The contents of config.json.

    Args:
        model: filled.
        family: from `choose_family(model)`.
        dtype: torch's name of the number format, `bfloat16`.
        special_ids: bos_token_id, eos_token_id and pad_token_id, None where there is no such token. Left out, they
            would be the class's own, which are of another vocabulary.
    """
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key: getattr(model, field) for field, key in KEYS[family.model_type].items()},
        **_OTHER_KEYS[family.model_type](model),
        **special_ids,
        "use_cache": True,
    }


def _gated(model: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": ACTIVATION_NAMES[model.activation], "attention_dropout": 0.0, **write_rope(model.rope)}


def _llama(model: ModelConfig) -> dict[str, Any]:
    has_bias = model.bias == "all"
    return {**_gated(model), "attention_bias": has_bias, "mlp_bias": has_bias}


def _mistral(model: ModelConfig) -> dict[str, Any]:
    return {**_gated(model), "sliding_window": model.sliding_window}


def _qwen2(model: ModelConfig) -> dict[str, Any]:
    windowed = model.sliding_window is not None
    return {
        **_gated(model),
        "use_sliding_window": windowed,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0 if windowed else model.num_layers,
        "layer_types": ["sliding_attention" if windowed else "full_attention"] * model.num_layers,
    }


def _qwen3(model: ModelConfig) -> dict[str, Any]:
    return {**_qwen2(model), "attention_bias": False}


def _gpt_neox(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model.rope, with_fraction=True)
    return {
        "hidden_act": ACTIVATION_NAMES[model.activation],
        "attention_bias": True,
        "use_parallel_residual": False,
        "hidden_dropout": model.dropout,
        "attention_dropout": 0.0,
        "rotary_emb_base": rope.pop("rope_theta"),
        "rotary_pct": model.rope.fraction,
        **rope,
    }


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": ACTIVATION_NAMES[model.activation],
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
    }


_OTHER_KEYS: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
}
