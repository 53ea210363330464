"""GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023): LayerNorm, GELU, partly rotated heads, attention and
MLP beside each other or one after the other."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import GPT_NEEDS, SIZES, gelu_name, read_gelu
from megalite.checkpoint.hf.family import QKV, Family
from megalite.checkpoint.hf.rope_json import RopeKeys, read_rope, write_rope
from megalite.checkpoint.hf.settings import Key, Settings

ROPE_KEYS = RopeKeys("rotary_emb_base", "rotary_pct", default_fraction=0.25)
FUSED = "attention.query_key_value"


def _read(settings: Settings) -> dict[str, Any]:
    settings.expect("attention_bias", True, True)
    return {
        **read_gelu(settings, "hidden_act", "gelu"),
        "positions": "rope",
        "rope": read_rope(settings, ROPE_KEYS, rotates_whole_heads=False),
        "parallel_residual": settings.take(Key("use_parallel_residual", bool, True)),
    }


def _write(model: Architecture) -> dict[str, Any]:
    rope = write_rope(model.rope, model.max_positions, with_fraction=True)
    return {
        "hidden_act": gelu_name(model),
        "attention_bias": True,
        "use_parallel_residual": model.parallel_residual,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        ROPE_KEYS.theta: rope.pop("rope_theta"),
        ROPE_KEYS.fraction: model.rope.fraction,
        **rope,
    }


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    rank=30,
    needs={**GPT_NEEDS, "positions": ("rope",), "parallel_residual": (False, True)},
    keys={**SIZES, "norm_eps": Key("layer_norm_eps", float, 1e-5)},
    read=_read,
    write=_write,
    outer={
        "embedding.weight": "gpt_neox.embed_in.weight",
        "final_norm.weight": "gpt_neox.final_layer_norm.weight",
        "final_norm.bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "embed_out.weight",
    },
    blocks="gpt_neox.layers",
    inner={
        "attention_norm": "input_layernorm",
        **dict.fromkeys(QKV, FUSED),
        "attention.o": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    harmless=frozenset({"hidden_dropout", "is_decoder"}),
    fused_by_head=frozenset({FUSED}),
)
