"""Models of every supported class as transformers makes and saves them, which megalite has never seen."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.checkpoint.hf_kit import (
    reload_here,  # noqa: F401 (a fixture)
)

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
GATED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 40}
IS_TRANSFORMERS_4 = transformers.__version__.startswith("4.")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


YARN = {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 16, "beta_fast": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "factor": 2.5,
    "original_max_position_embeddings": 16,
}
LONGROPE_OF_3 = {"type": "longrope", "short_factor": [1.0, 1.2, 1.4], "long_factor": [1.0, 3.0, 5.0]}
ONE_ABOVE = {"original_max_position_embeddings": 1}
ONE_POSITION = {**LONGROPE, **ONE_ABOVE}
LONGROPE_ABOVE = {"original_max_position_embeddings": 16}


def llama3_rope() -> dict[str, object]:
    """How the installed transformers is told of it; version 4 would read past version 5's key."""
    if IS_TRANSFORMERS_4:
        return {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": without_theta(LLAMA3)}
    return {"rope_parameters": LLAMA3}


def without_theta(rope: dict[str, object]) -> dict[str, object]:
    """Scaling of a rope as version 4 writes it, which has the base beside it."""
    return {key: value for key, value in rope.items() if key != "rope_theta"}


FEW_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

LATENTS = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "n_routed_experts": 6,
    "num_key_value_heads": 4,
}
OF_DEEPSEEK = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}

FOREIGN = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GATED)),
    "llama 3.1": (LlamaForCausalLM, LlamaConfig(**GATED, **llama3_rope(), tie_word_embeddings=True)),
    "llama, linear": (LlamaForCausalLM, LlamaConfig(**GATED, rope_scaling={"type": "linear", "factor": 2.0})),
    "llama, attention_bias": (LlamaForCausalLM, LlamaConfig(**GATED, attention_bias=True)),
    "llama, all biases": (LlamaForCausalLM, LlamaConfig(**GATED, attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**GATED, sliding_window=6, head_dim=16)),
    "mistral, no window": (MistralForCausalLM, MistralConfig(**GATED, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**GATED)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GATED, head_dim=16, rope_theta=1e6)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, rotary_pct=0.5, use_parallel_residual=False)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2)),
    "gpt_neox, parallel": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, rotary_pct=0.5)),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig(**GATED, rope_scaling=YARN)),
    "llama, longrope": (LlamaForCausalLM, LlamaConfig(**GATED, rope_scaling=LONGROPE, **LONGROPE_ABOVE)),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig(**GATED, head_dim=12, sliding_window=6, layer_types=["full_attention", "sliding_attention"]),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**GATED)),
    "qwen2, own head_dim": (Qwen2ForCausalLM, Qwen2Config(**{**GATED, "num_attention_heads": 10}, head_dim=8)),
    "phi3": (Phi3ForCausalLM, Phi3Config(**GATED, sliding_window=6, pad_token_id=None)),
    "phi3, longrope": (
        Phi3ForCausalLM,
        Phi3Config(
            **GATED,
            **LONGROPE_ABOVE,
            partial_rotary_factor=0.5,
            rope_scaling=dict(LONGROPE_OF_3),  # transformers adds keys to what it is given
            pad_token_id=None,
            tie_word_embeddings=True,
        ),
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GATED, head_dim=16, sliding_window=6, query_pre_attn_scalar=20)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**GATED, num_local_experts=3)),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(**GATED, **FEW_EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=2),
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**GATED, **FEW_EXPERTS, head_dim=16)),
    "qwen3_moe, one dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**GATED, **FEW_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=True),
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**GATED, num_experts=3, num_experts_per_tok=2, pad_token_id=None)),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**SIZES, **LATENTS, first_k_dense_replace=1, n_group=3, topk_group=2),
    ),
    "deepseek_v3, yarn": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **SIZES, **LATENTS, first_k_dense_replace=0, n_group=1, topk_group=1, rope_scaling=dict(OF_DEEPSEEK)
        ),
    ),
    "deepseek_v2, dense": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(**SIZES, **LATENTS, n_shared_experts=2, first_k_dense_replace=2),
    ),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config(**SIZES, **LATENTS, n_shared_experts=2)),
    "deepseek_v2, groups, yarn": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **{**SIZES, **LATENTS, "q_lora_rank": None},
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=3,
            topk_group=2,
            routed_scaling_factor=16.0,
            rope_scaling=dict(OF_DEEPSEEK),
        ),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **GATED,
            num_local_experts=3,
            num_experts_per_tok=2,
            head_dim=16,
            sliding_window=6,
            rope_theta=1.5e5,
            rope_scaling={**YARN, "truncate": False},
        ),
    ),
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**GATED, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    ),
}
"""Models made by transformers itself, saved by it, never seen by megalite."""


def save_foreign(folder: Path, name: str = "llama", **options: object) -> PreTrainedModel:
    """Save one of `FOREIGN`, with numbers in every weight."""
    kind, config = FOREIGN[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        biases = (each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
        for weight in (*model.parameters(), *biases):
            weight.data.normal_(0.0, 0.1)
    model.save_pretrained(folder, **options)
    return model


def edit_config(folder: Path, *removed: str, **changes: object) -> None:
    """Change some keys of config.json."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


def edit_tensors(folder: Path, *removed: str, **changes: torch.Tensor) -> None:
    """Change some tensors of model.safetensors; a `/` in a name stands for a dot."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("/", "."): tensor for name, tensor in changes.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if name not in removed}
    save_file(kept, path, metadata={"format": "pt"})
