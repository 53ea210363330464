"""Gemma 2 (Gemma team 2024): bounded scores and logits, a window for every other layer."""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.gemma import HARMLESS, NAMES, NEEDS, keys, read_gemma, soft_cap, write_gemma
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.rope_json import read_rope, write_rope
from megalite.checkpoint.hf.settings import Settings

ATTENTION_CAP = "attn_logit_softcapping"


def _read(settings: Settings) -> dict[str, Any]:
    cap = settings.take(soft_cap(ATTENTION_CAP, 50.0))
    fields = read_gemma(settings, pattern=2, logit_cap=30.0)
    return {**fields, "attention_soft_cap": cap, "rope": read_rope(settings)}


def _write(model: Architecture) -> dict[str, Any]:
    cap = {ATTENTION_CAP: model.attention_soft_cap}
    return {**write_gemma(model), **cap, **write_rope(model.rope, model.max_positions)}


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    rank=23,
    needs={**NEEDS, "qk_norm": (False,), "attention_soft_cap": (False, True)},
    keys=keys(num_kv_heads=4),
    read=_read,
    write=_write,
    harmless=HARMLESS,
    condition='transformers 4 bounds the scores of attention only when it is loaded with attn_implementation="eager"',
    **NAMES,
)
