"""Ministral (Mistral AI 2024): Mistral whose window holds for some layers only."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import (
    FULL,
    LLAMA_NAMES,
    LLAMA_NEEDS,
    SLIDING,
    llama_keys,
    read_layer_types,
    read_llama,
    take_num_layers,
    write_layer_types,
    write_llama,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings

WINDOW = 4096


def _read(settings: Settings) -> dict[str, Any]:
    window = settings.take(Key("sliding_window", int, WINDOW, nullable=True))
    num_layers = take_num_layers(settings)
    types = read_layer_types(settings, [FULL if window is None else SLIDING] * num_layers)
    if types and SLIDING in types and window is None:
        settings.complain("layer_types", f"found {SLIDING}, but there is no sliding_window")
    return {**read_llama(settings), "bias": "none", "sliding_window": window, "layer_types": types}


def _write(model: Architecture) -> dict[str, Any]:
    return {**write_llama(model), "sliding_window": model.sliding_window, "layer_types": write_layer_types(model)}


FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    rank=11,
    needs={**LLAMA_NEEDS, "qk_norm": (False,), "bias": ("none",), "layer_types": ("one", "mixed")},
    keys=llama_keys(num_kv_heads=Key("num_key_value_heads", int, 8, nullable=True), head_dim=Key("head_dim")),
    read=_read,
    write=_write,
    **LLAMA_NAMES,
)
