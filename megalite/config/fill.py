"""From the section `model` to a model with nothing left open."""

from __future__ import annotations

from typing import Any

from megalite.architecture.activations import is_gated
from megalite.architecture.architecture import Architecture
from megalite.architecture.settings import WeightScales
from megalite.config.batch_sizes import longest_sequence
from megalite.config.rounded import rounded_blocks
from megalite.config.schema import Config
from megalite.config.sections.batch import BatchConfig
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.precision import QatConfig
from megalite.errors import ConfigError

FFN_MULTIPLE = 64
"""A derived width with a gate is rounded up to this: divisible by every usual tp, and whole tiles."""


FILLED = ("num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size", "max_positions")
"""What a section may leave open."""


class FilledModel(ModelConfig):
    """The section with what follows from others, as checkpoints have it."""

    weight_scales: WeightScales | None = None
    """Of `precision.qat`, where it trains scales."""


def fill(config: Config, tokenizer_vocab_size: int | None = None) -> Architecture:
    """The model of a run, filled.

    Raises:
        ConfigError: no vocabulary size is known.
    """
    made = fill_model(config.model, config.batch, tokenizer_vocab_size)
    scales = trained_scales(config.precision.qat, made.num_layers)
    return made if scales is None else made.model_copy(update={"weight_scales": scales})


def trained_scales(qat: QatConfig | None, num_layers: int) -> WeightScales | None:
    """What is trained beside rounded weights; None for nothing, and where no block has such, which is refused."""
    if qat is None or not qat.learned_scales:
        return None
    blocks = rounded_blocks(qat, num_layers)
    if not blocks:
        return None
    return WeightScales(bits=qat.bits, group_size=qat.group_size, first_block=blocks[0], last_block=blocks[-1])


def scales_in_words(scales: WeightScales | None) -> str:
    """What is trained beside rounded weights, for people."""
    if scales is None:
        return "no scales that are trained"
    groups = "rows" if scales.group_size is None else f"groups of {scales.group_size}"
    return (
        f"scales of {scales.bits}-bit {groups} that are trained, in blocks {scales.first_block} to {scales.last_block}"
    )


def fill_model(model: ModelConfig, batch: BatchConfig, tokenizer_vocab_size: int | None = None) -> Architecture:
    """The model with every null replaced by the value it stands for.

    Raises:
        ConfigError: no vocabulary size is known.
    """
    vocab_size = model.vocab_size or tokenizer_vocab_size
    if vocab_size is None:
        raise ConfigError(
            ["model.vocab_size: null, and there is no tokenizer to take it from; set it, or set data.tokenizer"]
        )
    ffn = 4 * model.hidden_size
    if is_gated(model.activation):
        ffn = -(-8 * model.hidden_size // 3 // FFN_MULTIPLE) * FFN_MULTIPLE
    filled: dict[str, Any] = {
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.head_dim or (model.mla.head_dim if model.mla else model.hidden_size // model.num_heads),
        "ffn_hidden_size": model.ffn_hidden_size or ffn,
        "vocab_size": vocab_size,
        "max_positions": model.max_positions or longest_sequence(batch),
    }
    filled |= _windows(model)
    if model.moe is not None:
        width = model.moe.ffn_hidden_size or filled["ffn_hidden_size"]
        filled["moe"] = model.moe.model_copy(update={"ffn_hidden_size": width})
    given = {name: getattr(model, name) for name in type(model).model_fields if name != "preset"}
    made = Architecture.model_construct(**{**given, **filled})
    if made.moe is not None and all(made.sparse_blocks):  # no block has the other width
        return made.model_copy(update={"ffn_hidden_size": made.moe.ffn_hidden_size})
    return made


def _windows(model: ModelConfig) -> dict[str, Any]:
    """Which blocks have a window, said in one way: for all, for none, or each by itself."""
    types = model.layer_types and tuple(
        model.layer_types[index % len(model.layer_types)] for index in range(model.num_layers)
    )
    if types is None or set(types) == {"sliding_attention"}:
        return {"layer_types": None}
    if set(types) == {"full_attention"}:
        return {"layer_types": None, "sliding_window": None, "sliding_rope": None}
    return {"layer_types": types}
