"""What Gemma 2 and 3 share: norms that 1 is added to, on both sides of attention and MLP, GELU gates, scaled
embeddings, and a window for some of the layers."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import (
    LLAMA_NAMES,
    SIZES,
    SLIDING,
    read_layer_types,
    take_num_layers,
    write_layer_types,
)
from megalite.checkpoint.hf.family import ROOT, SQRT_HIDDEN, whole_scalar
from megalite.checkpoint.hf.settings import Key, Settings

GELU = "gelu_pytorch_tanh"

NEEDS: dict[str, tuple] = {
    "norm": ("zero_centered_rmsnorm",),
    "norm_placement": ("both",),
    "activation": ("geglu_tanh",),
    "positions": ("rope",),
    "rope.fraction": (1.0,),
    "bias": ("none", "attention"),
    "embedding_scale": (SQRT_HIDDEN,),
    "attention_scale": (False, ROOT),
    "logit_soft_cap": (False, True),
    "layer_types": ("one", "mixed"),
    "hidden_size % num_heads": (0,),
}

NAMES: dict[str, Any] = {
    **LLAMA_NAMES,
    "inner": {
        **LLAMA_NAMES["inner"],
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}

HARMLESS = frozenset({"cache_implementation", "hidden_act"})
"""`hidden_act` is of older folders; both classes go by `hidden_activation`."""

WINDOW = 4096


def keys(*, num_kv_heads: int) -> dict[str, Key]:
    """The sizes."""
    return {
        **SIZES,
        "tie_embeddings": Key("tie_word_embeddings", bool, True),
        "num_kv_heads": Key("num_key_value_heads", int, num_kv_heads),
        "head_dim": Key("head_dim", int, 256),
        "norm_eps": Key("rms_norm_eps", float, 1e-6),
    }


def soft_cap(name: str, default: float | None) -> Key:
    """A key with a bound, null for none."""
    return Key(name, float, default, nullable=True, has_point=True)


def read_gemma(settings: Settings, *, pattern: int, logit_cap: float | None) -> dict[str, Any]:
    """The fields that both share.

    Args:
        pattern: every so many layers one has no window, where layer_types are left out.
        logit_cap: bound of the logits, where it is left out.
    """
    settings.expect("hidden_activation", GELU, GELU)
    settings.expect("use_bidirectional_attention", None, None, False)
    num_layers = take_num_layers(settings)
    types = read_layer_types(
        settings, [SLIDING if (index + 1) % pattern else "full_attention" for index in range(num_layers)]
    )
    window = settings.take(Key("sliding_window", int, WINDOW, nullable=True))
    if types and SLIDING in types and window is None:
        settings.complain("layer_types", f"found {SLIDING}, but there is no sliding_window")
    scalar, head_dim = settings.take(Key("query_pre_attn_scalar", int, 256)), settings.take(Key("head_dim", int, 256))
    if scalar is not None and scalar < 1:
        settings.complain("query_pre_attn_scalar", f"found {scalar}, expected 1 or more")
    hidden = settings.take(Key("hidden_size", int, 0)) or 0
    return {
        "norm": "zero_centered_rmsnorm",
        "norm_placement": "both",
        "activation": "geglu_tanh",
        "positions": "rope",
        "bias": "attention" if settings.take(Key("attention_bias", bool, False)) else "none",
        "embedding_scale": hidden**0.5,
        "attention_scale": None if not scalar or scalar == head_dim else scalar**-0.5,
        "logit_soft_cap": settings.take(soft_cap("final_logit_softcapping", logit_cap)),
        "sliding_window": window,
        "layer_types": types,
    }


def write_gemma(model: Architecture) -> dict[str, Any]:
    """The keys that both share."""
    return {
        "hidden_activation": GELU,
        "attention_bias": model.bias == "attention",
        "attention_dropout": model.attention_dropout,
        "query_pre_attn_scalar": whole_scalar(model.attention_scale) if model.attention_scale else model.head_dim,
        "final_logit_softcapping": model.logit_soft_cap,
        "sliding_window": model.sliding_window or WINDOW,
        "layer_types": write_layer_types(model),
    }
