"""What DeepSeek-V2 and V3 have in common: latent attention, shared experts, dense blocks first.

Their stretch sharpens all of attention, not the rotated channels alone: `mscale_all_dim` stands for `attention_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import MOST_PREDICTIONS, MlaConfig
from megalite.checkpoint.hf.families.common import LLAMA_NAMES, LLAMA_NEEDS, SIZES, read_llama, write_llama
from megalite.checkpoint.hf.families.experts import EXPERT_NAMES, filled_moe
from megalite.checkpoint.hf.family import ANYTHING
from megalite.checkpoint.hf.settings import Key, Settings

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others."""

WIDTHS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""And what both classes take where nothing is said."""

DIGITS = 16
"""Of `mscale_all_dim` tried, the fewest first: more no number has."""

DEEPSEEK_NEEDS: dict[str, tuple] = {
    **LLAMA_NEEDS,
    "mla": (True,),
    "attention_scale": ANYTHING,
    "bias": ("none",),
    "sliding_window": (None,),
    "qk_norm": (False,),
    "moe": (True, False),
    "moe.scale": ANYTHING,
    "moe.shared": (True, False),
    "moe.num_groups": ANYTHING,
    "moe.blocks": ("all", "some"),
}

DEEPSEEK_KEYS = {**SIZES, "norm_eps": Key("rms_norm_eps", float, LATENT_EPS)}

ABOUT_TRAINING = frozenset({"aux_loss_alpha", "ep_size", "output_router_logits", "qk_head_dim", "seq_aux"})
"""Keys of a loss and of layouts, and a sum of other keys."""

DEEPSEEK_NAMES: dict[str, Any] = {
    **EXPERT_NAMES,
    "inner": {
        **{name: theirs for name, theirs in EXPERT_NAMES["inner"].items() if "attention." not in name},
        "attention.q": "self_attn.q_proj",
        "attention.q_a": "self_attn.q_a_proj",
        "attention.q_a_norm": "self_attn.q_a_layernorm",
        "attention.q_b": "self_attn.q_b_proj",
        "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.k_rope": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.k_b": "self_attn.kv_b_proj",
        "attention.v_b": "self_attn.kv_b_proj",
        "attention.o": LLAMA_NAMES["inner"]["attention.o"],
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.down": "mlp.shared_experts.down_proj",
        "mlp.router.balance": "mlp.gate.e_score_correction_bias",
    },
    "predicting": {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "norm": "shared_head.norm",
    },
    "fused_by_head": frozenset({"self_attn.kv_b_proj"}),
}


def read_deepseek(settings: Settings, *, interleaved: bool, q_lora_rank: int) -> dict[str, Any]:
    """The fields that both share, but for their experts."""
    fields = read_llama(settings)
    fields["rope"]["interleaved"] = interleaved
    settings.expect("attention_bias", False, False)
    eps = settings.take(Key("rms_norm_eps", float, LATENT_EPS))
    if eps not in (None, LATENT_EPS):
        settings.complain("rms_norm_eps", f"found {eps:g}, the norms of latents have {LATENT_EPS:g}: megalite has one")
    mla = _read_mla(settings, q_lora_rank)
    _check_sums(settings, mla)
    scale = _read_scale(settings, mla.head_dim)
    further = settings.take(Key("num_nextn_predict_layers", int, 0)) or 0
    if not 0 <= further <= MOST_PREDICTIONS:
        settings.complain("num_nextn_predict_layers", f"found {further}, megalite has 0 to {MOST_PREDICTIONS}")
    elif further:
        fields["mtp"] = {"num_layers": further}
    return {**fields, "mla": mla.model_dump(), "bias": "none", "attention_scale": scale}


def _read_mla(settings: Settings, q_lora_rank: int) -> MlaConfig:
    """The widths of latents and heads; a problem with those that are none."""
    keys = [Key(name, int, default) for name, default in WIDTHS.items()]
    keys.append(Key("q_lora_rank", int, q_lora_rank, nullable=True))
    found = {key.name: settings.take(key) for key in keys}
    wrong = {name: value for name, value in found.items() if value is not None and value < 1}
    for name, value in wrong.items():
        settings.complain(name, f"found {value}, expected 1 or more")
    kept = {name: value for name, value in found.items() if name not in wrong}
    return MlaConfig(**{name: value for name, value in kept.items() if value is not None or name == "q_lora_rank"})


def _check_sums(settings: Settings, mla: MlaConfig) -> None:
    """Keys that follow from others, which transformers makes anew; but for a null in place of the channels that it
    rotates, which it then tries to rotate."""
    heads = settings.take(Key("num_attention_heads", int, None))
    for name, expected in (("num_key_value_heads", heads), ("head_dim", mla.qk_rope_head_dim)):
        found = settings.take(Key(name, int, None, nullable=name != "head_dim"))
        if found is not None and expected is not None and found != expected:
            settings.complain(name, f"found {found}, expected {expected} of a model with latents")


def _read_scale(settings: Settings, head_dim: int) -> float | None:
    """The `attention_scale` that a stretch brings."""
    found = dict[str, float]()
    for name in ("rope_scaling", "rope_parameters"):
        group = settings.group(name)
        if group is None:
            continue
        scale = group.take(Key("mscale_all_dim", float, None, nullable=True))
        factor = group.take(Key("factor", float, None, nullable=True))
        if not scale:
            found[name] = 1.0
        elif factor is None or "yarn" not in (group.take(Key(key, str, None)) for key in ("rope_type", "type")):
            group.complain("mscale_all_dim", f"found {scale}, which stands beside a factor of rope_type 'yarn' alone")
        else:
            found[name] = sharpness(factor, scale)
    if len(set(found.values())) > 1:
        settings.complain("rope_scaling", "mscale_all_dim and factor differ from those of rope_parameters")
    least = min(found.values(), default=1.0)
    if least <= 0.0:
        settings.complain("rope_scaling", "mscale_all_dim makes attention's scale 0 or less")
        return None
    return None if least == 1.0 else scale_of(head_dim, least)


def sharpness(factor: float, mscale: float) -> float:
    """What yarn multiplies queries and keys with, each."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def scale_of(head_dim: int, sharper: float) -> float:
    """An `attention_scale`."""
    return head_dim**-0.5 * sharper * sharper


def write_deepseek(model: Architecture) -> dict[str, Any]:
    """The keys that both share, but for those of experts."""
    mla = model.mla
    assert mla is not None
    keys = {**write_llama(model), **mla.model_dump()}
    mscale, scaling = mscale_all_dim(model), model.rope.scaling
    if mscale is not None and scaling is not None:
        for name in ("rope_scaling", "rope_parameters"):
            keys[name] = {**keys[name], "mscale_all_dim": mscale}
            keys[name].setdefault("attention_factor", scaling.sharpness)
    return {
        **keys,
        "num_key_value_heads": model.num_heads,
        "head_dim": mla.qk_rope_head_dim,
        "attention_bias": False,
        "num_nextn_predict_layers": model.num_predictions,
    }


def mscale_all_dim(model: Architecture) -> float | None:
    """What stands for a model's `attention_scale`; None where nothing does, or nothing must."""
    tried = _nearest(model)
    return next((each for each in tried if _scale_by(model, each) == model.attention_scale), None)


def _nearest(model: Architecture) -> list[float]:
    """What may stand for it, by ever more digits; nothing where no stretch brings a scale."""
    scaling, scale = model.rope.scaling, model.attention_scale
    if scale is None or scaling is None or scaling.type != "yarn" or scaling.factor <= 1.0:
        return []
    exact = (math.sqrt(scale * math.sqrt(model.head_dim)) - 1.0) / (0.1 * math.log(scaling.factor))
    return [*(round(exact, digits) for digits in range(DIGITS)), exact]


def _scale_by(model: Architecture, mscale: float) -> float:
    assert model.rope.scaling is not None
    return scale_of(model.head_dim, sharpness(model.rope.scaling.factor, mscale))


def read_experts(settings: Settings, *, num_experts: int, width: int, num_shared: int, first_dense: int) -> dict | None:
    """The experts of either, given the defaults of its class, without what chooses them; None for a dense model."""
    first = settings.take(Key("first_k_dense_replace", int, first_dense)) or 0
    settings.expect("moe_layer_freq", 1, 1)
    width = settings.take(Key("moe_intermediate_size", int, width)) or 0
    shared = settings.take(Key("n_shared_experts", int, num_shared)) or 0
    found = {
        "num_experts": settings.take(Key("n_routed_experts", int, num_experts)),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": shared * width,
        "first_dense": first,
    }
    num_layers = settings.take(Key("num_hidden_layers", int, None))
    return None if num_layers is not None and first >= num_layers else found


def write_experts(model: Architecture) -> dict[str, Any]:
    """The same back."""
    if model.moe is None:
        return {"first_k_dense_replace": model.num_layers, "moe_layer_freq": 1}
    moe, width = filled_moe(model), filled_moe(model).ffn_hidden_size
    assert width is not None, "filled in"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": moe.shared_ffn_hidden_size // width,
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.normalize,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": 1,
        "output_router_logits": False,
    }


def refused_by_deepseek(model: Architecture) -> Iterator[str]:
    """What keeps a model from both."""
    if model.norm_eps != LATENT_EPS:
        yield f"model.norm_eps is {model.norm_eps:g}, its norms of latents have {LATENT_EPS:g}"
    if model.attention_scale is not None and mscale_all_dim(model) is None:
        near = [f"; the nearest is {_scale_by(model, each)!r}" for each in _nearest(model)[-1:]]
        yield f"model.attention_scale={model.attention_scale!r} is none that yarn brings{''.join(near)}"
    moe = model.moe
    if model.mtp is not None and not model.sparse_blocks[-1]:
        yield "model.mtp is beside a dense block, its layers that predict further have experts"
    if moe is None:
        return
    if moe.every != 1:
        yield f"model.moe.every is {moe.every}, it needs 1"
    if not moe.shared_ffn_hidden_size or moe.shared_ffn_hidden_size % (moe.ffn_hidden_size or 1):
        yield "model.moe.shared_ffn_hidden_size must be a multiple of moe.ffn_hidden_size"
