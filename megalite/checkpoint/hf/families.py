"""Which class of transformers represents a model, and what that class calls each weight.

A family says what it needs of a model; the first whose needs are all met represents it. Pure tables: how a config.json
is written and read is in `config_json` and `config_read`.

Models that several classes could represent get the plainest: Llama before Mistral, whose class also takes heads that do
not divide hidden_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.hf.layout import Place
from megalite.config.schema import ModelConfig
from megalite.errors import ConversionError
from megalite.model.weights import Weight, weight_table

QKV = ("attention.q", "attention.k", "attention.v")


@dataclass(frozen=True)
class Family:
    """A causal language model of transformers."""

    model_type: str
    """The value in config.json."""
    architecture: str
    """Name of the class."""
    needs: Mapping[str, tuple]
    """For each trait of a model (see `traits`) the values that the class can represent; others may be anything."""
    outer: Mapping[str, str]
    """Canonical name -> name, outside the blocks."""
    blocks: str
    """What the names inside the blocks begin with."""
    inner: Mapping[str, str]
    """Canonical name without `blocks.N.` and `.weight` -> the same of transformers, inside a block."""
    qkv: str = "separate"
    """separate; whole: fused q | k | v; per_head: fused q, k, v of each head."""
    transposed: bool = False
    """Whether the matrices inside the blocks are stored `[in, out]`."""

    @property
    def base(self) -> str:
        """What all names but the head's begin with; folders saved without the head lack it."""
        return self.blocks.split(".")[0] + "."


_LLAMA_OUTER = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LLAMA_INNER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA_NAMES = {"outer": _LLAMA_OUTER, "blocks": "model.layers", "inner": _LLAMA_INNER}

_NEOX_OUTER = {
    "embedding.weight": "gpt_neox.embed_in.weight",
    "final_norm.weight": "gpt_neox.final_layer_norm.weight",
    "final_norm.bias": "gpt_neox.final_layer_norm.bias",
    "head.weight": "embed_out.weight",
}
_NEOX_INNER = {
    "attention_norm": "input_layernorm",
    **dict.fromkeys(QKV, "attention.query_key_value"),
    "attention.o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

_GPT2_OUTER = {
    "embedding.weight": "transformer.wte.weight",
    "embedding.positions": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_GPT2_INNER = {
    "attention_norm": "ln_1",
    **dict.fromkeys(QKV, "attn.c_attn"),
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

EVEN_HEADS = "hidden_size / num_heads"
ALL_HEADS = "num_heads"

_GATED = {"norm": ("rmsnorm",), "activation": ("swiglu",), "positions": ("rope",), "rope.fraction": (1.0,)}
_GPT = {
    "norm": ("layernorm",),
    "activation": ("gelu", "gelu_tanh"),
    "bias": ("all",),
    "qk_norm": (False,),
    "num_kv_heads": (ALL_HEADS,),
    "head_dim": (EVEN_HEADS,),
    "sliding_window": (None,),
}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        {
            **_GATED,
            "qk_norm": (False,),
            "bias": ("none", "all"),
            "sliding_window": (None,),
            "hidden_size % num_heads": (0,),
        },
        **_LLAMA_NAMES,
    ),
    Family("mistral", "MistralForCausalLM", {**_GATED, "qk_norm": (False,), "bias": ("none",)}, **_LLAMA_NAMES),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {**_GATED, "qk_norm": (False,), "bias": ("qkv",), "head_dim": (EVEN_HEADS,)},
        **_LLAMA_NAMES,
    ),
    Family("qwen3", "Qwen3ForCausalLM", {**_GATED, "qk_norm": (True,), "bias": ("none",)}, **_LLAMA_NAMES),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {**_GPT, "positions": ("rope",)},
        outer=_NEOX_OUTER,
        blocks="gpt_neox.layers",
        inner=_NEOX_INNER,
        qkv="per_head",
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        {**_GPT, "positions": ("learned",)},
        outer=_GPT2_OUTER,
        blocks="transformer.h",
        inner=_GPT2_INNER,
        qkv="whole",
        transposed=True,
    ),
)
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}


def traits(model: ModelConfig) -> dict[str, Any]:
    """What decides which classes can represent a filled model."""
    is_even = model.head_dim * model.num_heads == model.hidden_size
    return {
        "norm": model.norm,
        "activation": model.activation,
        "positions": model.positions,
        "rope.fraction": model.rope.fraction,
        "qk_norm": model.qk_norm,
        "bias": model.bias,
        "sliding_window": model.sliding_window,
        "num_kv_heads": ALL_HEADS if model.num_kv_heads == model.num_heads else model.num_kv_heads,
        "head_dim": EVEN_HEADS if is_even else model.head_dim,
        "hidden_size % num_heads": model.hidden_size % model.num_heads,
    }


def choose_family(model: ModelConfig) -> Family:
    """The family that represents a filled model.

    Raises:
        ConversionError: there is none; names the nearest and what keeps it from fitting.
    """
    found = traits(model)
    unmet = [
        {trait: values for trait, values in family.needs.items() if found[trait] not in values} for family in FAMILIES
    ]
    nearest = min(range(len(FAMILIES)), key=lambda index: len(unmet[index]))
    if not unmet[nearest]:
        return FAMILIES[nearest]
    reasons = "; ".join(
        f"model.{trait} is {found[trait]}, it needs {' or '.join(map(str, values))}"
        for trait, values in unmet[nearest].items()
    )
    name = FAMILIES[nearest].architecture
    raise ConversionError(f"no class of transformers represents this model. The nearest is {name}, but {reasons}")


def places(model: ModelConfig, family: Family) -> dict[str, Place]:
    """The place of every canonical weight of a filled model, by canonical name."""
    return {weight.name: _place(weight, family, model.head_dim) for weight in weight_table(model).values()}


def _place(weight: Weight, family: Family, head_dim: int) -> Place:
    if weight.name in family.outer:
        return Place(family.outer[weight.name], group=weight.shape[0])
    _, index, inner = weight.name.split(".", 2)
    stem, kind = inner.rsplit(".", 1)
    tensor = f"{family.blocks}.{index}.{family.inner[stem]}.{kind}"
    transposed = family.transposed and len(weight.shape) == 2
    if stem not in QKV or family.qkv == "separate":
        return Place(tensor, group=weight.shape[0], transposed=transposed)
    group = head_dim if family.qkv == "per_head" else weight.shape[0]
    return Place(tensor, group=group, part=QKV.index(stem), num_parts=len(QKV), transposed=transposed)
