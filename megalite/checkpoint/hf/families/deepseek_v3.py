"""DeepSeek-V3 (DeepSeek-AI 2024): sigmoid routers with a bias in place of a loss, groups by their best two."""

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


def _read(settings: Settings) -> dict[str, Any]:
    interleaved = settings.take(Key("rope_interleave", bool, True))
    fields = read_deepseek(settings, interleaved=bool(interleaved), q_lora_rank=1536)
    settings.expect("scoring_func", "sigmoid", "sigmoid")
    settings.expect("topk_method", "noaux_tc", "noaux_tc")
    experts = read_experts(settings, num_experts=256, width=2048, num_shared=1, first_dense=3)
    chosen = {
        "top_k": settings.take(Key("num_experts_per_tok", int, 8)),
        "num_groups": settings.take(Key("n_group", int, 8)),
        "top_groups": settings.take(Key("topk_group", int, 4)),
        "normalize": settings.take(Key("norm_topk_prob", bool, True)),
        "scale": settings.take(Key("routed_scaling_factor", float, 2.5)),
    }
    if chosen["num_groups"] != 1:
        chosen["group_score"] = "sum_of_two"
    if experts is None:
        return fields
    if None not in (chosen["num_groups"], experts["num_experts"]) and 2 * chosen["num_groups"] > experts["num_experts"]:
        settings.complain("n_group", f"found {chosen['num_groups']}, whose best two experts are summed: each needs two")
    return {**fields, "moe": {**experts, **chosen, "scores": "sigmoid", "bias_rate": 0.0}}


def _write(model: Architecture) -> dict[str, Any]:
    return {**write_deepseek(model), **write_experts(model), "rope_interleave": model.rope.interleaved}


def _refuses(model: Architecture) -> Iterator[str]:
    yield from refused_by_deepseek(model)
    moe = model.moe
    if moe is None:
        return
    if moe.bias_rate is None or moe.scores != "sigmoid":
        yield "model.moe needs scores=sigmoid and a bias_rate, 0 for a bias that stays"
    if moe.num_groups > 1 and moe.group_score != "sum_of_two":
        yield f"model.moe.group_score is {moe.group_score}, it needs sum_of_two"
    if moe.num_experts // moe.num_groups < 2:
        yield "model.moe.num_groups must leave two experts in each"


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rank=35,
    needs={
        **DEEPSEEK_NEEDS,
        "mtp": (True, False),
        "rope.interleaved": (True, False),
        "moe.scores": ("sigmoid", "softmax"),
        "moe.normalize": (True, False),
        "moe.bias_rate": (True, False),
    },
    keys=DEEPSEEK_KEYS,
    read=_read,
    write=_write,
    harmless=ABOUT_TRAINING,
    published_code=frozenset(
        {
            "configuration_deepseek.DeepseekV3Config",
            "modeling_deepseek.DeepseekV3Model",
            "modeling_deepseek.DeepseekV3ForCausalLM",
        }
    ),
    refuses=_refuses,
    **DEEPSEEK_NAMES,
)
