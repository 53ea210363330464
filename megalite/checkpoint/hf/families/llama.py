"""Llama 1 to 3 (Touvron et al. 2023): RMSNorm, SwiGLU, rotary positions, grouped-query heads."""

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

_BIASES = {(False, False): "none", (True, False): "attention", (True, True): "all"}
"""attention_bias and mlp_bias -> ours."""


def _read(settings: Settings) -> dict[str, Any]:
    found = tuple(settings.take(Key(key, bool, False)) for key in ("attention_bias", "mlp_bias"))
    if found == (False, True):
        settings.complain("mlp_bias", "found true beside attention_bias false, megalite has both or attention's alone")
    return {**read_llama(settings), "bias": _BIASES.get(found)}


def _write(model: Architecture) -> dict[str, Any]:
    attention, mlp = next(keys for keys, bias in _BIASES.items() if bias == model.bias)
    return {**write_llama(model), "attention_bias": attention, "mlp_bias": mlp}


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    rank=0,
    needs={
        **LLAMA_NEEDS,
        "qk_norm": (False,),
        "bias": tuple(_BIASES.values()),
        "sliding_window": (None,),
        "hidden_size % num_heads": (0,),
    },
    keys=llama_keys(head_dim=NULLABLE_HEAD_DIM),
    read=_read,
    write=_write,
    **LLAMA_NAMES,
)
