"""Qwen 3 with experts (Qwen team 2025), as in Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import LLAMA_NEEDS, llama_keys, read_llama, write_llama
from megalite.checkpoint.hf.families.experts import (
    ABOUT_BALANCE,
    EXPERT_NAMES,
    MOE_NEEDS,
    read_qwen_experts,
    write_qwen_experts,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings

WINDOW = 4096


def _read(settings: Settings) -> dict[str, Any]:
    is_used = settings.take(Key("use_sliding_window", bool, False))
    window = settings.take(Key("sliding_window", int, WINDOW, nullable=True))
    return {
        **read_llama(settings),
        "bias": "attention" if settings.take(Key("attention_bias", bool, False)) else "none",
        "qk_norm": True,
        "sliding_window": window if is_used else None,
        "moe": read_qwen_experts(settings, top_k=8, width=768, num_experts=128),
    }


def _write(model: Architecture) -> dict[str, Any]:
    return {
        **write_llama(model),
        **write_qwen_experts(model),
        "attention_bias": model.bias == "attention",
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
    }


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    rank=31,
    needs={**LLAMA_NEEDS, **MOE_NEEDS, "qk_norm": (True,), "bias": ("none", "attention")},
    keys=llama_keys(num_kv_heads=Key("num_key_value_heads", int, 4, nullable=True)),
    read=_read,
    write=_write,
    harmless=ABOUT_BALANCE | {"max_window_layers"},
    **EXPERT_NAMES,
)
