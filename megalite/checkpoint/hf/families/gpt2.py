"""GPT-2 (Radford et al. 2019): LayerNorm, GELU, learned positions."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import GPT_NEEDS, gelu_name, read_gelu
from megalite.checkpoint.hf.family import QKV, Family
from megalite.checkpoint.hf.settings import Key, Settings


def _read(settings: Settings) -> dict[str, Any]:
    settings.expect("scale_attn_weights", True, True)
    settings.expect("scale_attn_by_inverse_layer_idx", False, False)
    settings.expect("add_cross_attention", False, False)
    return {**read_gelu(settings, "activation_function", "gelu_new"), "positions": "learned"}


def _write(model: Architecture) -> dict[str, Any]:
    return {
        "activation_function": gelu_name(model),
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "scale_attn_weights": True,
    }


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    rank=31,
    needs={**GPT_NEEDS, "positions": ("learned",)},
    keys={
        "vocab_size": Key("vocab_size"),
        "hidden_size": Key("n_embd"),
        "ffn_hidden_size": Key("n_inner", int, None, nullable=True),
        "num_layers": Key("n_layer"),
        "num_heads": Key("n_head"),
        "max_positions": Key("n_positions"),
        "init_std": Key("initializer_range", float, 0.02),
        "tie_embeddings": Key("tie_word_embeddings", bool, True),
        "norm_eps": Key("layer_norm_epsilon", float, 1e-5),
    },
    read=_read,
    write=_write,
    outer={
        "embedding.weight": "transformer.wte.weight",
        "embedding.positions": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    blocks="transformer.h",
    inner={
        "attention_norm": "ln_1",
        **dict.fromkeys(QKV, "attn.c_attn"),
        "attention.o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    harmless=frozenset(
        {
            "attn_pdrop",
            "embd_pdrop",
            "is_decoder",
            "n_ctx",
            "reorder_and_upcast_attn",
            "resid_pdrop",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    transposed=True,
)
