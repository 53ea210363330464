"""Gemma 3, its language model (Gemma team 2025): normalised heads, five layers with a window to one without, and rotary
settings of each kind.

    transformers 4     rope_theta, rope_scaling: layers without a window; rope_local_base_freq: those with one
    transformers 5     rope_parameters: {full_attention: {...}, sliding_attention: {...}}, and the older keys as well
"""

from __future__ import annotations

from typing import Any

from megalite.architecture.architecture import Architecture
from megalite.checkpoint.hf.families.gemma import HARMLESS, NAMES, NEEDS, keys, read_gemma, write_gemma
from megalite.checkpoint.hf.family import Family
from megalite.checkpoint.hf.rope_json import DISAGREE, ORIGINAL, original_length, read_rope_group, write_scaling
from megalite.checkpoint.hf.settings import Key, Settings

THETA, LOCAL_THETA = 1e6, 1e4
PATTERN = 6
"""Every so many layers one has no window, where nothing is said."""

KINDS = {"full_attention": THETA, "sliding_attention": LOCAL_THETA}


def _read_rope(settings: Settings) -> dict[str, Any]:
    """`rope` and `sliding_rope`."""
    length = settings.take(Key("max_position_embeddings", int, None))
    original = settings.take(ORIGINAL)
    has_older = any(key in settings for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"))
    theta = settings.take(Key("rope_theta", float, THETA))
    local = settings.take(Key("rope_local_base_freq", float, LOCAL_THETA))
    stretch = read_rope_group(settings.group("rope_scaling"), original, length)
    found = [{"theta": theta, "scaling": None, **stretch}, {"theta": local, "scaling": None}]
    is_split = "rope_theta" in settings and found[0]["theta"] != theta
    group = settings.group("rope_parameters")
    if group is not None:
        own = [read_rope_group(group.group(kind), original, length) for kind in KINDS]
        group.refuse_unknown()
        newer = [{"theta": theta, "scaling": None, **each} for theta, each in zip(KINDS.values(), own, strict=True)]
        is_split |= has_older and newer != found
        found = newer
    if is_split:
        settings.problems.append(DISAGREE)
    if any(each.pop("fraction", 1.0) != 1.0 for each in found):
        settings.complain("rope_parameters", "this class rotates whole heads")
    return dict(zip(("rope", "sliding_rope"), found, strict=True))


def _read(settings: Settings) -> dict[str, Any]:
    pattern = settings.take(Key("sliding_window_pattern", int, PATTERN))
    if pattern is not None and pattern < 1:
        settings.complain("sliding_window_pattern", f"found {pattern}, expected 1 or more")
    settings.expect("attn_logit_softcapping", None, None)  # the class keeps it, and computes without it
    fields = read_gemma(settings, pattern=max(1, pattern or PATTERN), logit_cap=None)
    return {**fields, "qk_norm": True, **_read_rope(settings)}


def _write(model: Architecture) -> dict[str, Any]:
    local = model.sliding_rope or model.rope
    stretch = {} if model.rope.scaling is None else write_scaling(model.rope.scaling, model.max_positions)
    return {
        **write_gemma(model),
        "rope_theta": model.rope.theta,
        "rope_local_base_freq": local.theta,
        "rope_scaling": stretch or None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **stretch, "rope_theta": model.rope.theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local.theta},
        },
        **original_length(stretch),
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    rank=24,
    needs={**NEEDS, "qk_norm": (True,), "sliding_rope": (False, True)},
    keys=keys(num_kv_heads=4),
    read=_read,
    write=_write,
    harmless=HARMLESS | {"_sliding_window_pattern"},
    **NAMES,
)
