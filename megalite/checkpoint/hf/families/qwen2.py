"""Qwen 2 and 2.5 (Qwen team 2024): Llama with biases on query, key and value."""

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
    return {**read_llama(settings), "bias": "qkv", "sliding_window": read_qwen_window(settings)}


def _write(model: Architecture) -> dict[str, Any]:
    return {**write_llama(model), **write_qwen_window(model)}


FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    rank=20,
    needs={**LLAMA_NEEDS, "qk_norm": (False,), "bias": ("qkv",)},
    keys=llama_keys(num_kv_heads=Key("num_key_value_heads", int, 32, nullable=True)),
    read=_read,
    write=_write,
    condition="its tokenizer has to be Qwen2's, since transformers 5 splits texts as Qwen2 does whatever lies in such "
    "a folder; with another one, export with --tokenizer none",
    **LLAMA_NAMES,
)
