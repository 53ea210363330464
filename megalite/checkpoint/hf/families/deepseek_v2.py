"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): softmax routers, groups by their best expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.deepseek import (
    ABOUT_TRAINING,
    DEEPSEEK_KEYS,
    DEEPSEEK_NAMES,
    DEEPSEEK_NEEDS,
    read_deepseek,
    read_experts,
    refused_by_deepseek,
    write_deepseek,
    write_experts,
)
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.settings import Key, Settings

ONE_GROUP, BY_GROUP = "greedy", "group_limited_greedy"


def _read(settings: Settings) -> dict[str, Any]:
    fields = read_deepseek(settings, interleaved=True, q_lora_rank=1536)
    settings.expect("scoring_func", "softmax", "softmax")
    settings.expect("mlp_bias", False, False)
    settings.expect("norm_topk_prob", False, False)
    experts = read_experts(settings, num_experts=64, width=1407, num_shared=2, first_dense=0)
    method = settings.expect("topk_method", ONE_GROUP, ONE_GROUP, BY_GROUP)
    groups = [settings.take(Key(name, int, None, nullable=True)) for name in ("n_group", "topk_group")]
    scale = settings.take(Key("routed_scaling_factor", float, 1.0))
    if experts is None:
        settings.take(Key("num_experts_per_tok", int, None, nullable=True))
        return fields
    experts |= {"top_k": settings.take(Key("num_experts_per_tok", int)), "normalize": False, "scale": scale}
    if method == BY_GROUP:
        if None in groups:
            settings.complain("n_group", f"topk_method {BY_GROUP!r} needs it, and topk_group")
        experts |= dict(zip(("num_groups", "top_groups"), groups, strict=True))
    return {**fields, "moe": {name: value for name, value in experts.items() if value is not None}}


def _write(model: Architecture) -> dict[str, Any]:
    has_groups = model.moe is not None and model.moe.num_groups > 1
    return {
        **write_deepseek(model),
        **write_experts(model),
        "topk_method": BY_GROUP if has_groups else ONE_GROUP,
        "mlp_bias": False,
    }


def _refuses(model: Architecture) -> Iterator[str]:
    yield from refused_by_deepseek(model)
    if model.mla is not None and model.mla.kv_lora_rank % 2:
        yield f"model.mla.kv_lora_rank is {model.mla.kv_lora_rank}, transformers turns keys behind an even one only"
    if model.mla is not None and model.mla.qk_nope_head_dim % 2:
        nope = model.mla.qk_nope_head_dim
        yield f"model.mla.qk_nope_head_dim is {nope}, transformers turns queries behind an even one only"
    if model.hidden_size % model.num_heads:
        yield f"model.hidden_size={model.hidden_size} is no multiple of num_heads={model.num_heads}, as its class asks"
    moe = model.moe
    if moe is None:
        return
    if moe.normalize:
        yield "model.moe.normalize is True, it needs False"
    if moe.num_groups > 1 and moe.group_score != "max":
        yield f"model.moe.group_score is {moe.group_score}, it needs max"


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    rank=36,
    needs={**DEEPSEEK_NEEDS, "rope.interleaved": (True,), "moe.normalize": (True, False)},
    keys=DEEPSEEK_KEYS,
    read=_read,
    write=_write,
    harmless=ABOUT_TRAINING,
    published_code=frozenset(
        {
            "configuration_deepseek.DeepseekV2Config",
            "modeling_deepseek.DeepseekV2Model",
            "modeling_deepseek.DeepseekV2ForCausalLM",
        }
    ),
    refuses=_refuses,
    condition="with a stretch, transformers before 5 leaves DeepSeek-V2's mscale_all_dim out of attention",
    **DEEPSEEK_NAMES,
)
