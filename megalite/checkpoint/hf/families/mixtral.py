"""Mixtral (Jiang et al. 2024): Mistral with experts, whose weights are a softmax over the chosen ones."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import LLAMA_NEEDS, NULLABLE_HEAD_DIM, llama_keys, read_llama, write_llama
from megalite.checkpoint.hf.families.experts import (
    ABOUT_BALANCE,
    EXPERT_NAMES,
    MOE_NEEDS,
    filled_moe,
    take_num_experts,
    write_balance,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.rope_json import RopeKeys
from megalite.checkpoint.hf.settings import Key, Settings

ROPE_KEYS = RopeKeys(default_theta=1e6)

_INNER = {
    **EXPERT_NAMES["inner"],
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.*.gate": "block_sparse_moe.experts.*.w1",
    "mlp.experts.*.up": "block_sparse_moe.experts.*.w3",
    "mlp.experts.*.down": "block_sparse_moe.experts.*.w2",
}


def _read(settings: Settings) -> dict[str, Any]:
    experts = {
        "num_experts": take_num_experts(settings, 8),
        "top_k": settings.take(Key("num_experts_per_tok", int, 2)),
    }
    window = settings.take(Key("sliding_window", int, None, nullable=True))
    fields = read_llama(settings, ROPE_KEYS)
    scaling = fields["rope"]["scaling"]
    if scaling is not None and scaling["type"] in ("yarn", "longrope") and "head_dim" not in settings:
        settings.complain("head_dim", f"found null beside {scaling['type']}, where transformers wants the number")
    return {**fields, "bias": "none", "sliding_window": window, "moe": experts}


def _write(model: Architecture) -> dict[str, Any]:
    moe = filled_moe(model)
    return {
        **write_llama(model),
        "sliding_window": model.sliding_window,
        "intermediate_size": moe.ffn_hidden_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        **write_balance(model),
    }


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    rank=30,
    needs={
        **LLAMA_NEEDS,
        **MOE_NEEDS,
        "moe.normalize": (True,),
        "moe.blocks": ("all",),
        "qk_norm": (False,),
        "bias": ("none",),
    },
    keys={
        **llama_keys(num_kv_heads=Key("num_key_value_heads", int, 8, nullable=True), head_dim=NULLABLE_HEAD_DIM),
        "norm_eps": Key("rms_norm_eps", float, 1e-5),
    },
    read=_read,
    write=_write,
    harmless=ABOUT_BALANCE,
    **{**EXPERT_NAMES, "inner": _INNER},
)
