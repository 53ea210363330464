"""gpt-oss (OpenAI 2025): windows in every other layer, heads with sinks, biases throughout, experts as one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import (
    FULL,
    LLAMA_NAMES,
    SLIDING,
    llama_keys,
    read_layer_types,
    take_num_layers,
    write_layer_types,
    write_llama,
)
from megalite.checkpoint.hf.families.experts import ABOUT_BALANCE, filled_moe, take_num_experts, write_balance
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.rope_json import RopeKeys, read_rope
from megalite.checkpoint.hf.settings import Key, Settings

CLAMP, SIGMOID_SCALE = 7.0, 1.702
"""Of the activation `swiglu_clamped`, whose class can be told others in version 5 and has these in 4."""
ROPE_KEYS = RopeKeys(default_theta=150000.0)
WINDOW = 128

_INNER = {
    **{name: theirs for name, theirs in LLAMA_NAMES["inner"].items() if not name.startswith("mlp.")},
    "attention": "self_attn",
    "mlp.router": "mlp.router",
    "mlp.experts.*.gate": "mlp.experts.gate_up_proj",
    "mlp.experts.*.up": "mlp.experts.gate_up_proj",
    "mlp.experts.*.down": "mlp.experts.down_proj",
}


def _read(settings: Settings) -> dict[str, Any]:
    settings.expect("hidden_act", "silu", "silu", "swish")
    settings.expect("swiglu_alpha", SIGMOID_SCALE, SIGMOID_SCALE)
    settings.expect("swiglu_limit", CLAMP, CLAMP)
    settings.expect("attention_bias", True, True)
    if "rope_scaling" not in settings and "rope_parameters" not in settings:
        settings.complain("rope_scaling", "missing, where transformers has a stretch of its own; say which")
    window = settings.take(Key("sliding_window", int, WINDOW, nullable=True))
    num_layers = take_num_layers(settings)
    types = read_layer_types(settings, [FULL if index % 2 else SLIDING for index in range(num_layers)])
    if types and SLIDING in types and window is None:
        settings.complain("layer_types", f"found {SLIDING}, but there is no sliding_window")
    experts = {
        "num_experts": take_num_experts(settings, 128),
        "top_k": settings.take(Key("num_experts_per_tok", int, 4)),
        "logit_bias": True,
    }
    return {
        "norm": "rmsnorm",
        "activation": "swiglu_clamped",
        "positions": "rope",
        "rope": read_rope(settings, ROPE_KEYS),
        "bias": "all",
        "attention_sinks": True,
        "sliding_window": window,
        "layer_types": types,
        "moe": experts,
    }


def _write(model: Architecture) -> dict[str, Any]:
    moe = filled_moe(model)
    return {
        **write_llama(model),
        "attention_bias": True,
        "intermediate_size": moe.ffn_hidden_size,
        "layer_types": write_layer_types(model),
        "num_experts_per_tok": moe.top_k,
        "num_local_experts": moe.num_experts,
        "sliding_window": model.sliding_window or WINDOW,  # transformers makes its mask, used or not
        "swiglu_alpha": SIGMOID_SCALE,
        "swiglu_limit": CLAMP,
        **write_balance(model),
    }


def _refuses(model: Architecture) -> Iterator[str]:
    if model.moe is not None and not model.moe.normalize:
        yield "model.moe.normalize is False, it needs True"


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    rank=34,
    needs={
        "norm": ("rmsnorm",),
        "activation": ("swiglu_clamped",),
        "positions": ("rope",),
        "rope.fraction": (1.0,),
        "qk_norm": (False,),
        "bias": ("all",),
        "layer_types": ("one", "mixed"),
        "attention_sinks": (True,),
        "moe": (True,),
        "moe.logit_bias": (True,),
        "moe.blocks": ("all",),
    },
    keys={
        **llama_keys(num_kv_heads=Key("num_key_value_heads", int, 8), head_dim=Key("head_dim", int, 64)),
        "norm_eps": Key("rms_norm_eps", float, 1e-5),
        "max_positions": Key("max_position_embeddings", int, 131072),
    },
    read=_read,
    write=_write,
    harmless=ABOUT_BALANCE | {"experts_per_token", "initial_context_length"},
    refuses=_refuses,
    transposed_experts=True,
    experts_by_row=True,
    **{**LLAMA_NAMES, "inner": _INNER},
)
