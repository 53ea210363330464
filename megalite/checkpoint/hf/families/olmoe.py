"""OLMoE (Muennighoff et al. 2024): experts in each block, and norms over all query and all key heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import LLAMA_NEEDS, llama_keys, read_llama, write_llama
from megalite.checkpoint.hf.families.experts import (
    ABOUT_BALANCE,
    EXPERT_NAMES,
    MOE_NEEDS,
    filled_moe,
    take_num_experts,
    write_balance,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings


def _read(settings: Settings) -> dict[str, Any]:
    settings.expect("clip_qkv", None, None)
    experts = {
        "num_experts": take_num_experts(settings, 64),
        "top_k": settings.take(Key("num_experts_per_tok", int, 8)),
        "normalize": settings.take(Key("norm_topk_prob", bool, False)),
    }
    bias = "attention" if settings.take(Key("attention_bias", bool, False)) else "none"
    return {**read_llama(settings), "bias": bias, "qk_norm": "whole", "moe": experts}


def _write(model: Architecture) -> dict[str, Any]:
    moe = filled_moe(model)
    return {
        **write_llama(model),
        "attention_bias": model.bias == "attention",
        "clip_qkv": None,
        "intermediate_size": moe.ffn_hidden_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        **write_balance(model),
    }


def _refuses(model: Architecture) -> Iterator[str]:
    if model.num_heads * model.head_dim != model.hidden_size:
        yield f"model.head_dim is {model.head_dim}, its norms over all heads are for hidden_size / num_heads"


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    rank=33,
    needs={
        **LLAMA_NEEDS,
        **MOE_NEEDS,
        "moe.blocks": ("all",),
        "qk_norm": ("whole",),
        "bias": ("none", "attention"),
        "sliding_window": (None,),
        "hidden_size % num_heads": (0,),
    },
    keys={**llama_keys(), "norm_eps": Key("rms_norm_eps", float, 1e-5)},
    read=_read,
    write=_write,
    refuses=_refuses,
    harmless=ABOUT_BALANCE,
    **EXPERT_NAMES,
)
