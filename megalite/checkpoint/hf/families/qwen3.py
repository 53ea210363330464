"""Qwen 3 (Qwen team 2025): Llama with normalised query and key heads."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import (
    LLAMA_NAMES,
    LLAMA_NEEDS,
    llama_keys,
    read_llama,
    read_qwen_window,
    write_llama,
    write_qwen_window,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings


def _read(settings: Settings) -> dict[str, Any]:
    bias = "attention" if settings.take(Key("attention_bias", bool, False)) else "none"
    return {**read_llama(settings), "bias": bias, "qk_norm": True, "sliding_window": read_qwen_window(settings)}


def _write(model: Architecture) -> dict[str, Any]:
    return {**write_llama(model), **write_qwen_window(model), "attention_bias": model.bias == "attention"}


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    rank=21,
    needs={**LLAMA_NEEDS, "qk_norm": (True,), "bias": ("none", "attention")},
    keys=llama_keys(
        num_kv_heads=Key("num_key_value_heads", int, 32, nullable=True), head_dim=Key("head_dim", int, 128)
    ),
    read=_read,
    write=_write,
    **LLAMA_NAMES,
)
