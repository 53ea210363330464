"""Qwen 2 with experts (Qwen team 2024), as in Qwen1.5-MoE-A2.7B: one shared expert beside the chosen ones, gated."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import (
    FULL,
    LLAMA_NEEDS,
    SLIDING,
    llama_keys,
    read_layer_types,
    read_llama,
    take_num_layers,
    write_llama,
)
from megalite.checkpoint.hf.families.experts import (
    ABOUT_BALANCE,
    EXPERT_NAMES,
    MOE_NEEDS,
    filled_moe,
    read_qwen_experts,
    write_qwen_experts,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings


def _read(settings: Settings) -> dict[str, Any]:
    settings.expect("use_sliding_window", False, False)
    types = read_layer_types(settings, [FULL] * take_num_layers(settings))
    if SLIDING in (types or ()):
        settings.complain("layer_types", f"found windows, megalite has only {FULL} for this class")
    shared = {
        "shared_ffn_hidden_size": settings.take(Key("shared_expert_intermediate_size", int, 5632)),
        "shared_gate": True,
    }
    return {
        **read_llama(settings),
        "bias": "qkv" if settings.take(Key("qkv_bias", bool, True)) else "none",
        "moe": {**read_qwen_experts(settings, top_k=4, width=1408, num_experts=60), **shared},
    }


def _write(model: Architecture) -> dict[str, Any]:
    return {
        **write_llama(model),
        **write_qwen_experts(model),
        "shared_expert_intermediate_size": filled_moe(model).shared_ffn_hidden_size,
        "qkv_bias": model.bias == "qkv",
        "use_sliding_window": False,
        "layer_types": [FULL] * model.num_layers,
    }


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    rank=32,
    needs={
        **LLAMA_NEEDS,
        **MOE_NEEDS,
        "moe.shared": (True,),
        "moe.shared_gate": (True,),
        "qk_norm": (False,),
        "bias": ("none", "qkv"),
        "sliding_window": (None,),
        "hidden_size % num_heads": (0,),
    },
    keys=llama_keys(num_kv_heads=Key("num_key_value_heads", int, 16, nullable=True)),
    read=_read,
    write=_write,
    harmless=ABOUT_BALANCE | {"sliding_window", "max_window_layers"},
    **EXPERT_NAMES,
)
