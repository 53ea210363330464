"""What a model's settings must have to do with each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megalite.architecture.architecture import Architecture
from megalite.architecture.attentions import ATTENTIONS
from megalite.architecture.costs import MOST_KEPT
from megalite.architecture.settings import LoraConfig, MlaConfig
from megalite.architecture.weights import adapters_of, is_adapter, weight_table
from megalite.config.checks_init import check_init
from megalite.config.checks_moe import check_experts
from megalite.config.checks_mtp import check_predictions
from megalite.config.schema import Config, ModelConfig, RopeConfig, RopeScaling
from megalite.config.wording import divisors, near, or_, unused
from megalite.section import LARGEST_NUMBER

OF_STRETCHES: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_positions"),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", "original_max_positions"),
}
"""By type of a stretch, the settings that it has."""


def check_model(config: Config, model: Architecture) -> Iterator[str]:
    """Complaints about the section `model`, with what it stands for."""
    if config.batch.seq_len > model.max_positions:
        yield (
            f"batch.seq_len: {config.batch.seq_len} is longer than model.max_positions={model.max_positions}; use a "
            "shorter sequence or more positions"
        )
    yield from check_architecture(config.model, model)


def check_architecture(given: ModelConfig, model: Architecture) -> Iterator[str]:
    """Complaints about a model by itself, filled from what was given."""
    yield from _heads(given, model) if model.mla is None else _latents(given, model, model.mla)
    if model.attention_soft_cap is not None and not ATTENTIONS[model.attention].takes_soft_cap:
        yield f"model.attention_soft_cap: attention={model.attention} does not bound its scores; use null"
    if model.attention_sinks and ATTENTIONS[model.attention].function is not None:
        yield f"model.attention_sinks: attention={model.attention} is a plug-in's, which has none; use false"
    if model.attention_dropout and ATTENTIONS[model.attention].function is not None:
        yield f"model.attention_dropout: attention={model.attention} is a plug-in's, which drops nothing; use 0"
    if model.parallel_residual and model.norm_placement == "post":
        yield (
            "model.parallel_residual: norm_placement=post normalises the stream between attention and MLP, which here "
            "read the same one; use false, or norm_placement=before, after or both"
        )
    yield from _windows(given)
    yield from check_experts(model)
    yield from check_predictions(model)
    yield from check_init(given, model)
    if model.lora is not None:
        yield from _adapters(model, model.lora)
    if model.positions == "learned":
        yield from unused(model.rope, RopeConfig.model_fields, "model.rope", "positions=learned")
        yield from unused(given, ("sliding_rope",), "model", "positions=learned")
        return
    if model.mla is not None and model.turned_dim % 2:
        return  # as `_latents` says
    yield from _rotary(model.rope, "model.rope", model.turned_dim, model.max_positions)
    if model.sliding_rope is not None:
        yield from _rotary(model.sliding_rope, "model.sliding_rope", model.turned_dim, model.max_positions)


def _heads(given: ModelConfig, model: Architecture) -> Iterator[str]:
    if given.head_dim is None and given.hidden_size % given.num_heads:
        yield (
            f"model.head_dim: null stands for hidden_size / num_heads, but {given.hidden_size} / {given.num_heads} is "
            f"not whole; use hidden_size={or_(near(given.hidden_size, given.num_heads))}, or set head_dim"
        )
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_kv_heads: num_heads={model.num_heads} is not a multiple of num_kv_heads={model.num_kv_heads}; "
            f"use {or_(divisors(model.num_heads))}"
        )


def _latents(given: ModelConfig, model: Architecture, mla: MlaConfig) -> Iterator[str]:
    """Multi-head latent attention has heads of its own kind."""
    yield from unused(given, ("qk_norm",), "model", "mla, which normalises latents")
    if model.attention_sinks:
        yield "model.attention_sinks: heads made of latents have none here; use false, or mla=null"
    if given.head_dim not in (None, mla.head_dim):
        yield (
            f"model.head_dim: found {given.head_dim}, and mla has qk_nope_head_dim + qk_rope_head_dim = "
            f"{mla.head_dim}; use null"
        )
    if model.num_kv_heads != model.num_heads:
        yield (
            f"model.num_kv_heads: mla makes keys and values of all num_heads={model.num_heads}, found "
            f"{model.num_kv_heads}; use null"
        )
    if mla.qk_rope_head_dim % 2:
        yield (
            f"model.mla.qk_rope_head_dim: {mla.qk_rope_head_dim} channels are rotated, and they turn in pairs; use "
            f"{or_(near(mla.qk_rope_head_dim, 2))}"
        )
    if mla.v_head_dim > mla.head_dim:
        yield (
            f"model.mla.v_head_dim: {mla.v_head_dim} is wider than queries and keys, {mla.head_dim} channels, which no "
            f"kernel takes; use {mla.head_dim} or less"
        )
    if model.positions != "rope":
        yield f"model.positions: mla rotates a part of each head; found {model.positions}, use rope"
    elif any(rope.fraction != 1.0 for rope in (model.rope, model.sliding_rope) if rope is not None):
        yield "model.rope.fraction: mla.qk_rope_head_dim says how much of a head is rotated; use 1"
    if model.bias != "none":
        yield f"model.bias: mla has none; found {model.bias}, use none"
    if model.mup is not None:
        yield "model.mup: no rule is known here for the widths of latents; use mup=null, or mla=null"


def _adapters(model: Architecture, lora: LoraConfig) -> Iterator[str]:
    has = _adaptable(model.model_copy(update={"lora": lora.model_copy(update={"targets": None})}))
    lacking = [] if lora.targets is None else [each for each in lora.targets if each not in has]
    if lacking:
        yield f"model.lora.targets: no layer that can be adapted is called {or_(lacking)}; there are {', '.join(has)}"
    elif not lora.found_targets:
        yield "model.lora.targets: empty, and nothing would be learnt; name some layers, or set model.lora=null"
    else:
        yield from _high_rank(model, lora)
    if model.mup is not None:
        yield (
            "model.mup: how adapters scale with the width is not known here; use model.lora=null, or export the "
            "checkpoint, which multiplies muP's factors into the weights, and begin with that and mup=null"
        )


@lru_cache(maxsize=MOST_KEPT)
def _adaptable(model: Architecture) -> tuple[str, ...]:
    """Names of layers that have adapters. One expert of a block stands for all."""
    names = (name for name, weight in weight_table(model).items() if weight.expert is None or weight.expert[0] == 0)
    return tuple(dict.fromkeys(name.split(".")[-2] for name in names if is_adapter(name)))


def _high_rank(model: Architecture, lora: LoraConfig) -> Iterator[str]:
    """A rank that no adapted matrix has: an adapter would have more numbers than what it corrects."""
    highest = _highest_rank(model)
    if highest is not None and lora.rank > highest:
        yield (
            f"model.lora.rank: {lora.rank}, and what is adapted has rank {highest} at most; use less, or "
            "set model.lora=null, which trains them whole"
        )


@lru_cache(maxsize=MOST_KEPT)
def _highest_rank(model: Architecture) -> int | None:
    """Of matrices that have adapters; None where none has."""
    table = weight_table(model, {0, model.num_layers - 1})
    of_targets = (row.shape for row in table.values() if row.is_matrix and adapters_of(row, 1)[0].name in table)
    return max((min(shape) for shape in of_targets), default=None)


def _windows(given: ModelConfig) -> Iterator[str]:
    if given.sliding_window is None:
        yield from unused(given, ("sliding_rope",), "model", "sliding_window=null")
    types = given.layer_types
    if types is None:
        return
    if not 1 <= len(types) <= given.num_layers:
        yield (
            f"model.layer_types: found {len(types)} kinds for num_layers={given.num_layers} blocks; name one for each, "
            "or a shorter pattern that is repeated"
        )
    if "sliding_attention" in types and given.sliding_window is None:
        yield "model.layer_types: sliding_attention needs sliding_window, which is null; set it, or take the kind out"


def _rotary(rope: RopeConfig, name: str, head_dim: int, max_positions: int) -> Iterator[str]:
    rotated = int(head_dim * rope.fraction)
    if head_dim and (rotated % 2 or not rotated):
        legal = [n / head_dim for n in (rotated - 1, rotated + 1, rotated + 2) if n % 2 == 0 and 0 < n <= head_dim]
        advice = f"use fraction={or_(legal)}" if legal else "use head_dim=2 or more"
        yield (
            f"{name}.fraction: {rope.fraction} of head_dim={head_dim} rotates {rotated} channels, and they turn in "
            f"pairs; {advice}"
        )
    if rope.theta < 1.0:
        yield f"{name}.theta: {rope.theta:g} is below 1, so frequencies would grow without bound; use 10000 or more"
    if rope.scaling is not None:
        yield from _scaling(rope.scaling, f"{name}.scaling", rotated // 2)
        yield from _arithmetic(rope, rope.scaling, name, max_positions)


def _scaling(scaling: RopeScaling, name: str, num_pairs: int) -> Iterator[str]:
    others = [key for key in RopeScaling.model_fields if key not in (*OF_STRETCHES[scaling.type], "type")]
    yield from unused(scaling, others, name, f"type={scaling.type}")
    if scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        default = RopeScaling(type="llama3")
        yield (
            f"{name}: low_freq_factor={scaling.low_freq_factor:g} must be below "
            f"high_freq_factor={scaling.high_freq_factor:g}; Llama 3.1 has {default.low_freq_factor:g} and "
            f"{default.high_freq_factor:g}"
        )
    if scaling.type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        yield (
            f"{name}: beta_slow={scaling.beta_slow:g} must be below beta_fast={scaling.beta_fast:g}; the paper has 1 "
            "and 32"
        )
    for key in ("short_factor", "long_factor") if scaling.type == "longrope" else ():
        if (found := len(getattr(scaling, key))) != num_pairs:
            yield f"{name}.{key}: found {found} numbers, expected {num_pairs}: one for each rotated pair of channels"


def _arithmetic(rope: RopeConfig, scaling: RopeScaling, name: str, max_positions: int) -> Iterator[str]:
    """What a stretch would divide by zero, or turn into angles that no number format has."""
    if scaling.type == "yarn" and rope.theta == 1.0:
        yield f"{name}.theta: 1 gives all pairs one frequency, and yarn divides by its logarithm, 0; use a larger one"
    has_root = scaling.type == "longrope" and scaling.attention_factor is None and scaling.factor > 1.0
    if has_root and scaling.original_max_positions == 1:
        yield (
            f"{name}.scaling.original_max_positions: 1, and null for attention_factor divides by its logarithm, 0; set "
            "the length of the training before the stretch, or attention_factor"
        )
    keys = ("short_factor", "long_factor") if scaling.type == "longrope" else ("factor",)
    for key in keys:
        value = getattr(scaling, key)
        least = min(value, default=1.0) if isinstance(value, tuple) else value
        if max_positions / least > LARGEST_NUMBER:
            yield (
                f"{name}.scaling.{key}: {least:g} stretches nothing, and at position {max_positions} angles would be "
                f"beyond 2^63; use 1 or more"
            )
