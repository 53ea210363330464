"""transformers' models of the families that megalite covers, with random weights, and where each weight is in them.

The names are written down here anew, apart from the project's table and its exporters, so that they check both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megalite.architecture.architecture import Architecture
from megalite.architecture.weights import Rectangle, Weight
from megalite.config.fill import fill_model
from megalite.config.schema import BatchConfig, ModelConfig
from tests.kit.reference import reference_name

SEQ_LEN = 28
"""Tokens of the stream; divides by 4."""

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 48, "vocab_size": 101}
SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

Find = Callable[[dict[str, Tensor], str, Architecture], Tensor]
"""A canonical weight, by name, out of tensors that are named and shaped like transformers' parameters."""


@dataclass(frozen=True)
class Family:
    """A model as both projects describe it."""

    settings: dict[str, Any]
    """megalite's, beside SIZES."""
    build: Callable[[Architecture], nn.Module]
    """transformers' model."""
    find: Find
    packs: bool = True
    """Its own mask can be replaced by one for packed documents; Mistral's own window is what is to be tested."""
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.float64, torch.float32))

    @property
    def model(self) -> Architecture:
        return fill_model(ModelConfig(**{**SIZES, **self.settings}), BatchConfig(seq_len=SEQ_LEN))


def _llama_like(
    config_type: type, model_type: type, rope_scaling: dict[str, Any] | None = None, **settings: Any
) -> Callable[[Architecture], nn.Module]:
    """A builder of models whose configs are named like Llama's."""

    def build(model: Architecture) -> nn.Module:
        rope = {"rope_type": "default", "rope_theta": model.rope.theta, **(rope_scaling or {})}
        return model_type(
            config_type(
                **{"attn_implementation": "sdpa", "rope_parameters": rope, **settings},
                vocab_size=model.vocab_size,
                hidden_size=model.hidden_size,
                intermediate_size=model.ffn_hidden_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads,
                num_key_value_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                rms_norm_eps=model.norm_eps,
                tie_word_embeddings=model.tie_embeddings,
                **SPECIAL_TOKENS,
            )
        )

    return build


def _build_neox(model: Architecture) -> nn.Module:
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            layer_norm_eps=model.norm_eps,
            rotary_pct=model.rope.fraction,
            use_parallel_residual=model.parallel_residual,
            attn_implementation="sdpa",
            **SPECIAL_TOKENS,
        )
    )


def _build_gpt2(model: Architecture) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=model.vocab_size,
            n_embd=model.hidden_size,
            n_inner=model.ffn_hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            n_positions=model.max_positions,
            layer_norm_epsilon=model.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
            **SPECIAL_TOKENS,
        )
    )


AFTER = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
BOTH = {**AFTER, "mlp_norm": "pre_feedforward_layernorm"}


def _find_with_norms(names: dict[str, str]) -> Find:
    """As Llama's, but for the norms of a block."""

    def find(tensors: dict[str, Tensor], name: str, model: Architecture) -> Tensor:
        layer, _, inner = name.removesuffix(".weight").rpartition(".")
        if inner in names:
            return tensors[f"model.layers.{layer.split('.')[1]}.{names[inner]}.weight"]
        return tensors[reference_name(name)]

    return find


GEMMA = {
    "norm": "zero_centered_rmsnorm",
    "norm_placement": "both",
    "activation": "geglu_tanh",
    "embedding_scale": 32**0.5,
    "num_kv_heads": 2,
    "head_dim": 12,
    "tie_embeddings": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_KEYS = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}


def _find_llama(tensors: dict[str, Tensor], name: str, model: Architecture) -> Tensor:
    return tensors[reference_name(name)]


NEOX_OUTER = {"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "lm_head"}
NEOX_INNER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def _find_neox(tensors: dict[str, Tensor], name: str, model: Architecture) -> Tensor:
    """q, k and v of a head stand together in one matrix, head after head."""
    stem, _, kind = name.rpartition(".")
    if stem in NEOX_OUTER:
        return tensors[f"{NEOX_OUTER[stem]}.{kind}"]
    _, index, inner = stem.split(".", 2)
    layer = f"gpt_neox.layers.{index}"
    if inner in NEOX_INNER:
        return tensors[f"{layer}.{NEOX_INNER[inner]}.{kind}"]
    fused = tensors[f"{layer}.attention.query_key_value.{kind}"]
    heads = fused.unflatten(0, (model.num_heads, 3, model.head_dim))
    return heads[:, "qkv".index(inner.removeprefix("attention."))].flatten(0, 1)


GPT2_OUTER = {"embedding.weight": "wte.weight", "embedding.positions": "wpe.weight"}
GPT2_INNER = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _find_gpt2(tensors: dict[str, Tensor], name: str, model: Architecture) -> Tensor:
    """Matrices are stored as [in, out]; q, k and v stand side by side in one."""
    if name in GPT2_OUTER:
        return tensors[f"transformer.{GPT2_OUTER[name]}"]
    stem, _, kind = name.rpartition(".")
    if stem == "final_norm":
        return tensors[f"transformer.ln_f.{kind}"]
    _, index, inner = stem.split(".", 2)
    layer = f"transformer.h.{index}"
    if inner.endswith("norm"):
        return tensors[f"{layer}.{GPT2_INNER[inner]}.{kind}"]
    if inner in GPT2_INNER:
        return tensors[f"{layer}.{GPT2_INNER[inner]}.{kind}"].t()
    fused = tensors[f"{layer}.attn.c_attn.{kind}"].t()
    return fused.chunk(3)["qkv".index(inner.removeprefix("attention."))]


PHI3_FUSED = {
    "attention.q": ("self_attn.qkv_proj", lambda model: (0, model.num_heads * model.head_dim)),
    "attention.k": ("self_attn.qkv_proj", lambda model: (model.num_heads * model.head_dim, _kv_width(model))),
    "attention.v": ("self_attn.qkv_proj", lambda model: (model.num_heads * model.head_dim + _kv_width(model), None)),
    "mlp.gate": ("mlp.gate_up_proj", lambda model: (0, model.ffn_hidden_size)),
    "mlp.up": ("mlp.gate_up_proj", lambda model: (model.ffn_hidden_size, None)),
}


def _kv_width(model: Architecture) -> int:
    return model.num_kv_heads * model.head_dim


def _find_phi3(tensors: dict[str, Tensor], name: str, model: Architecture) -> Tensor:
    """All queries, then all keys, then all values in one matrix; all gates before what they let through in another."""
    layer, _, inner = name.removesuffix(".weight").partition(".")[2].partition(".")
    if inner not in PHI3_FUSED:
        return tensors[reference_name(name)]
    fused, rows = PHI3_FUSED[inner]
    first, count = rows(model)
    last = None if count is None else first + count
    return tensors[f"model.layers.{layer}.{fused}.weight"][first:last]


LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_positions": 16}

FAMILIES = {
    "Llama": Family(
        {"num_kv_heads": 2}, _llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM), _find_llama
    ),
    "Llama 3.1, tied": Family(
        {"tie_embeddings": True, "rope": {"theta": 500000.0, "scaling": LLAMA3}},
        _llama_like(
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        _find_llama,
        dtypes=(torch.float32,),  # the frequencies themselves agree to fp32 only
    ),
    "Qwen3": Family(
        {"num_kv_heads": 2, "qk_norm": True, "head_dim": 12, "tie_embeddings": True},
        _llama_like(transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        _find_llama,
    ),
    "Mistral": Family(
        {"num_kv_heads": 2, "sliding_window": 5},
        _llama_like(transformers.MistralConfig, transformers.MistralForCausalLM, sliding_window=5),
        _find_llama,
        packs=False,
    ),
    "GPT-NeoX": Family(
        {"norm": "layernorm", "activation": "gelu", "bias": "all", "rope": {"fraction": 0.25}}, _build_neox, _find_neox
    ),
    "Pythia": Family(
        {
            "norm": "layernorm",
            "activation": "gelu",
            "bias": "all",
            "rope": {"fraction": 0.25},
            "parallel_residual": True,
        },
        _build_neox,
        _find_neox,
    ),
    "Phi-3": Family(
        {"num_kv_heads": 2, "head_dim": 12, "rope": {"fraction": 0.5}},
        _llama_like(
            transformers.Phi3Config,
            transformers.Phi3ForCausalLM,
            rope_scaling={"partial_rotary_factor": 0.5},
        ),
        _find_phi3,
    ),
    "OLMo 2": Family(
        {"num_kv_heads": 2, "qk_norm": "whole", "norm_placement": "after"},
        _llama_like(transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        _find_with_norms(AFTER),
    ),
    "Ministral": Family(
        {"num_kv_heads": 2, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
        _llama_like(
            transformers.MinistralConfig,
            transformers.MinistralForCausalLM,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention"],
        ),
        _find_llama,
        packs=False,
    ),
    "Gemma 2": Family(
        {**GEMMA, "attention_scale": 20**-0.5, "attention_soft_cap": 2.0, "logit_soft_cap": 3.0},
        _llama_like(
            transformers.Gemma2Config, transformers.Gemma2ForCausalLM, attn_implementation="eager", **GEMMA_KEYS
        ),
        _find_with_norms(BOTH),
        packs=False,
        dtypes=(torch.float32,),  # the embedding's factor is fp32 there
    ),
    "Gemma 3": Family(
        {**GEMMA, "qk_norm": True, "attention_scale": 20**-0.5, "sliding_rope": {"theta": 100.0}},
        _llama_like(
            transformers.Gemma3TextConfig,
            transformers.Gemma3ForCausalLM,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            **{**GEMMA_KEYS, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        ),
        _find_with_norms(BOTH),
        packs=False,
        dtypes=(torch.float32,),
    ),
    "GPT-2": Family(
        {
            "norm": "layernorm",
            "activation": "gelu_tanh",
            "bias": "all",
            "positions": "learned",
            "tie_embeddings": True,
        },
        _build_gpt2,
        _find_gpt2,
    ),
}


def build_reference(family: Family, dtype: torch.dtype) -> nn.Module:
    """transformers' model with weights large enough that every one of them matters.

    transformers computes RMSNorm in fp32 whatever the format; for float64 it is replaced by torch's own.
    """
    reference = family.build(family.model).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.3 + parameter.round())  # norms stay around 1, biases around 0
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    if dtype == torch.float64:
        for module in reference.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _rms_norm_of(module)
    return reference


def _rms_norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


class ReferenceWeights:
    """A weight source that reads a transformers model."""

    def __init__(self, family: Family, tensors: dict[str, Tensor]):
        self._family, self._tensors = family, tensors

    def read(self, weight: Weight, rectangle: Rectangle) -> Tensor:
        whole = self._family.find(self._tensors, weight.name, self._family.model)
        assert whole.shape == weight.shape, weight.name
        return whole[rectangle.slices]


def parameters_and_gradients(reference: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors by name, and their gradients."""
    named: Iterator[tuple[str, nn.Parameter]] = reference.named_parameters()
    parameters = {name: parameter.detach() for name, parameter in named}
    return parameters, {name: parameter.grad for name, parameter in reference.named_parameters()}
