"""OLMo 2 (OLMo team 2024): Llama that normalises what comes out of attention and MLP, and all heads as one."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import LLAMA_NAMES, LLAMA_NEEDS, llama_keys, read_llama, write_llama
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings

_INNER = {
    **{name: theirs for name, theirs in LLAMA_NAMES["inner"].items() if not name.endswith("_norm") or "." in name},
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _read(settings: Settings) -> dict[str, Any]:
    bias = "attention" if settings.take(Key("attention_bias", bool, False)) else "none"
    return {**read_llama(settings), "bias": bias, "qk_norm": "whole", "norm_placement": "after"}


def _write(model: Architecture) -> dict[str, Any]:
    return {**write_llama(model), "attention_bias": model.bias == "attention"}


FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    rank=22,
    needs={
        **LLAMA_NEEDS,
        "qk_norm": ("whole",),
        "norm_placement": ("after",),
        "bias": ("none", "attention"),
        "sliding_window": (None,),
        "hidden_size % num_heads": (0,),
    },
    keys={**llama_keys(), "norm_eps": Key("rms_norm_eps", float, 1e-5)},
    read=_read,
    write=_write,
    **{**LLAMA_NAMES, "inner": _INNER},
)
