"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with fused matrices, partly rotated heads, and a window over all
layers or none.

Its longrope has a form of its own. Version 4 takes a `rope_scaling` of three keys and no other, and version 5 prefers
it to `rope_parameters`, so in both the factor follows from max_position_embeddings and
original_max_position_embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.common import HEAD_DIM, LLAMA_NAMES, llama_keys, read_llama, write_llama
from megalite.checkpoint.hf.family import QKV, Family
from megalite.checkpoint.hf.rope_json import ORIGINAL
from megalite.checkpoint.hf.settings import Key, Settings

LONGROPE = "longrope"

NO_BIAS = dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), False)
UNREAD = {**NO_BIAS, "full_attn_mod": 1, "interpolate_factor": 1}
"""Of published folders, for the code that they brought with them; the class reads none of these."""


def _read(settings: Settings) -> dict[str, Any]:
    for key, only in UNREAD.items():
        settings.expect(key, only, only)
    fields = read_llama(settings, rotates_whole_heads=False)
    scaling = fields["rope"]["scaling"]
    if scaling is not None and scaling["type"] != LONGROPE:
        settings.complain("rope_scaling", f"found {scaling['type']!r}, this class has only {LONGROPE!r} or none")
    width, num_heads = (settings.take(Key(key, int, 0)) for key in ("hidden_size", "num_attention_heads"))
    head_dim = settings.take(HEAD_DIM)
    if scaling is not None and width and num_heads and head_dim not in (None, width // num_heads):
        settings.complain("head_dim", f"found {head_dim}, beside {LONGROPE} it can only be {width // num_heads}")
    window = settings.take(Key("sliding_window", int, None, nullable=True))
    return {**fields, "bias": "none", "sliding_window": window}


def _write(model: Architecture) -> dict[str, Any]:
    keys = {
        **write_llama(model),
        "partial_rotary_factor": model.rope.fraction,
        "sliding_window": model.sliding_window,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
    }
    scaling = model.rope.scaling
    if scaling is None:
        keys["rope_parameters"]["partial_rotary_factor"] = model.rope.fraction
        return {ORIGINAL.name: model.max_positions, **keys}
    stretch = {"type": LONGROPE, "short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    newer = {
        "rope_type": LONGROPE,
        "rope_theta": model.rope.theta,
        "partial_rotary_factor": model.rope.fraction,
        ORIGINAL.name: scaling.original_max_positions,
    }
    return {**keys, "rope_scaling": stretch, "rope_parameters": {**stretch, **newer}}


def _refuses(model: Architecture) -> Iterator[str]:
    """Longrope with a factor of its own, or beside heads of another width than it is checked for."""
    scaling = model.rope.scaling
    if model.positions != "rope" or scaling is None:
        return
    plain = scaling.model_copy(update={"attention_factor": None})
    factor = model.max_positions / scaling.original_max_positions
    if scaling.factor != factor or scaling.sharpness != plain.sharpness:
        yield (
            f"model.rope.scaling has factor={scaling.factor} and attention_factor={scaling.attention_factor}, it takes "
            f"max_positions / original_max_positions = {factor} and null"
        )
    if model.head_dim != model.hidden_size // model.num_heads:
        yield f"model.head_dim is {model.head_dim}, with {LONGROPE} it needs hidden_size / num_heads"


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    rank=25,
    needs={
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "positions": ("rope",),
        "qk_norm": (False,),
        "bias": ("none",),
        "rope.scaling": (None, LONGROPE),
    },
    keys={**llama_keys(), "norm_eps": Key("rms_norm_eps", float, 1e-5)},
    read=_read,
    write=_write,
    refuses=_refuses,
    published_code=frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM", "Xenova/gpt-4o"}),
    harmless=frozenset({"resid_pdrop", "embd_pdrop"}),
    **{
        **LLAMA_NAMES,
        "inner": {
            **LLAMA_NAMES["inner"],
            **dict.fromkeys(QKV, "self_attn.qkv_proj"),
            **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
        },
    },
)
