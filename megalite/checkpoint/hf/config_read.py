"""config.json of a Hugging Face folder as a model, or refused by name.

What only matters in training (dropout) is not read. Whatever changes the function and has no counterpart here is
refused, all of it at once: a model that is nearly the same would train, and be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.checkpoint.hf.config_json import FILE_NAME, KEYS
from megalite.checkpoint.hf.families import BY_MODEL_TYPE, Family
from megalite.checkpoint.hf.rope_json import read_rope
from megalite.config.plan import fill_model
from megalite.config.schema import BatchConfig, ModelConfig
from megalite.errors import ConversionError, did_you_mean

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"norm_eps": 1e-6, "tie_embeddings": False},
    "mistral": {"norm_eps": 1e-6, "tie_embeddings": False, "num_kv_heads": 8},
    "qwen2": {"norm_eps": 1e-6, "tie_embeddings": False, "num_kv_heads": 32},
    "qwen3": {"norm_eps": 1e-6, "tie_embeddings": False, "num_kv_heads": 32, "head_dim": 128},
    "gpt_neox": {"norm_eps": 1e-5, "tie_embeddings": False},
    "gpt2": {"norm_eps": 1e-5, "tie_embeddings": True},
}
"""What the classes take for keys that are left out, where it is not derived from others."""

DERIVED = ("num_kv_heads", "head_dim", "init_std")
"""Fields that may be null: they then follow from others, here as there."""

MISTRAL_WINDOW = 4096
QWEN_FIRST_WINDOWED_LAYER = 28
NEOX_FRACTION = 0.25

SILU = ("silu", "swish")
GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
MLP_BIASES = frozenset({"mlp.gate.bias", "mlp.up.bias", "mlp.down.bias"})


@dataclass(frozen=True)
class Description:
    """What a config.json says."""

    family: Family
    model: ModelConfig
    """Filled."""
    absent: frozenset[str] = frozenset()
    """Weights of a block that the model has here and its class there has not: they are zero."""


def read_config(folder: Path) -> Description:
    """Read config.json.

    Raises:
        ConversionError: it is missing or damaged, or of a model that megalite does not have.
    """
    path = folder / FILE_NAME
    raw = _load(path)
    family = BY_MODEL_TYPE.get(raw.get("model_type"))
    if family is None:
        found = raw.get("model_type")
        raise ConversionError(
            f"{path}: model_type is {found!r}{did_you_mean(str(found), BY_MODEL_TYPE)}; megalite reads "
            f"{', '.join(BY_MODEL_TYPE)}"
        )
    problems: list[str] = []
    if raw.get("quantization_config"):
        problems.append("quantization_config: quantized weights cannot be trained; take the unquantized folder")
    try:
        fields = _read_sizes(raw, family.model_type, problems)
        fields |= _READERS[family.model_type](raw, problems)
    except (TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: a setting is of the wrong kind ({error})") from error
    if problems:
        raise ConversionError("\n".join([f"{path}: not a model that megalite has:", *(f"  - {p}" for p in problems)]))
    try:
        model = fill_model(ModelConfig(**fields), BatchConfig())
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConversionError(f"{path}: settings that no model has: {wrong}") from error
    only_attention = family.model_type == "llama" and model.bias == "all" and not raw.get("mlp_bias", False)
    return Description(family, model, MLP_BIASES if only_attention else frozenset())


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConversionError(f"{path.parent}: no {path.name}, so this is not the folder of a Hugging Face model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConversionError(f"{path}: cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise ConversionError(f"{path}: found a {type(raw).__name__}, expected an object of settings")
    return raw


def _read_sizes(raw: dict[str, Any], model_type: str, problems: list[str]) -> dict[str, Any]:
    """The fields that only have another name there."""
    keys = KEYS[model_type]
    fields = {**DEFAULTS[model_type], **{field: raw[key] for field, key in keys.items() if key in raw}}
    fields = {field: value for field, value in fields.items() if value is not None}
    may_lack = (*DERIVED, "ffn_hidden_size") if model_type == "gpt2" else DERIVED
    problems += [f"{key}: missing" for field, key in keys.items() if field not in fields and field not in may_lack]
    return fields


def _expect(raw: dict[str, Any], problems: list[str], key: str, default: Any, *allowed: Any) -> Any:
    """The value of a key, with a problem when megalite has no such thing."""
    found = raw.get(key, default)
    if found not in allowed:
        problems.append(f"{key} is {found!r}, megalite has only {' or '.join(map(repr, allowed))}")
    return found


def _gated(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    _expect(raw, problems, "hidden_act", "silu", *SILU)
    rope = read_rope(raw, problems)
    if rope["fraction"] != 1.0:
        problems.append(f"partial_rotary_factor is {rope['fraction']!r}, this class rotates whole heads")
    return {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "rope": rope}


def _llama(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    attention_bias, mlp_bias = raw.get("attention_bias", False), raw.get("mlp_bias", False)
    if mlp_bias and not attention_bias:
        problems.append("mlp_bias is true and attention_bias is false, megalite has both, or that of attention alone")
    return {**_gated(raw, problems), "bias": "all" if attention_bias else "none"}


def _mistral(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    return {**_gated(raw, problems), "bias": "none", "sliding_window": raw.get("sliding_window", MISTRAL_WINDOW)}


def _qwen2(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    return {**_gated(raw, problems), "bias": "qkv", "sliding_window": _qwen_window(raw, problems)}


def _qwen3(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    _expect(raw, problems, "attention_bias", False, False)
    return {**_gated(raw, problems), "bias": "none", "qk_norm": True, "sliding_window": _qwen_window(raw, problems)}


def _qwen_window(raw: dict[str, Any], problems: list[str]) -> int | None:
    """The window of all layers; a problem when only some have one."""
    if not raw.get("use_sliding_window", False):
        return None
    first = raw.get("max_window_layers", QWEN_FIRST_WINDOWED_LAYER)
    derived = ["sliding_attention" if i >= first else "full_attention" for i in range(raw.get("num_hidden_layers", 0))]
    kinds = set(raw.get("layer_types") or derived)
    if len(kinds) > 1:
        problems.append(f"layer_types mixes {' and '.join(sorted(kinds))}, megalite has one kind for all layers")
    return raw.get("sliding_window", MISTRAL_WINDOW) if kinds == {"sliding_attention"} else None


def _gpt_neox(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    activation = _expect(raw, problems, "hidden_act", "gelu", *GELU)
    _expect(raw, problems, "attention_bias", True, True)
    if raw.get("use_parallel_residual", True):
        problems.append("use_parallel_residual is true, megalite runs attention and MLP one after the other")
    rope = read_rope(raw, problems, default_fraction=NEOX_FRACTION)
    return {"norm": "layernorm", "activation": GELU.get(activation), "positions": "rope", "bias": "all", "rope": rope}


def _gpt2(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    activation = _expect(raw, problems, "activation_function", "gelu_new", *GELU)
    _expect(raw, problems, "scale_attn_weights", True, True)
    _expect(raw, problems, "scale_attn_by_inverse_layer_idx", False, False)
    _expect(raw, problems, "add_cross_attention", False, False)
    return {"norm": "layernorm", "activation": GELU.get(activation), "positions": "learned", "bias": "all"}


_READERS: Mapping[str, Callable[[dict[str, Any], list[str]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
}
