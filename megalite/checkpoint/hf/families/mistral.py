"""Mistral 7B (Jiang et al. 2023): Llama with a window over all layers, and heads that need not divide the width."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import (
    LLAMA_NAMES,
    LLAMA_NEEDS,
    NULLABLE_HEAD_DIM,
    llama_keys,
    read_llama,
    write_llama,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings

WINDOW = 4096


def _read(settings: Settings) -> dict[str, Any]:
    window = settings.take(Key("sliding_window", int, WINDOW, nullable=True))
    return {**read_llama(settings), "bias": "none", "sliding_window": window}


def _write(model: Architecture) -> dict[str, Any]:
    return {**write_llama(model), "sliding_window": model.sliding_window}


FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    rank=10,
    needs={**LLAMA_NEEDS, "qk_norm": (False,), "bias": ("none",)},
    keys=llama_keys(num_kv_heads=Key("num_key_value_heads", int, 8, nullable=True), head_dim=NULLABLE_HEAD_DIM),
    read=_read,
    write=_write,
    **LLAMA_NAMES,
)
