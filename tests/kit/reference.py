"""The independent truth: transformers' Llama, plain autograd, torch's AdamW and clip, one process.

Packed documents become a dense attention mask, which megalite never builds; accumulation, tensor parallelism and
sharding do not exist here. Only the initial weights are shared.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megalite.architecture.weights import weight_table
from megalite.config.schema import Config, ModelConfig
from megalite.model.initialize import FreshWeights
from megalite.optim.schedules import learning_rate
from tests.kit.batches import random_sequence

PROJECTIONS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
OUTER = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def reference_name(name: str) -> str:
    """transformers' name of a canonical weight, written down anew so that it checks the project's own table."""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, index, inner = stem.split(".", 2)
    return f"model.layers.{index}.{PROJECTIONS[inner]}.{kind}"


def reference_model(model: ModelConfig, seed: int) -> torch.nn.Module:
    """transformers' model with the weights that megalite starts from."""
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope.theta},
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "eager",
    }
    kind = (Qwen3Config, Qwen3ForCausalLM) if model.qk_norm else (LlamaConfig, LlamaForCausalLM)
    reference = kind[1](kind[0](**common))
    source = FreshWeights(model, seed)
    state = {reference_name(row.name): source.read(row, row.local(1, 0)) for row in weight_table(model).values()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.tie_embeddings else set())
    reference.tie_weights()
    return reference


def dense_inputs(indices: range, *, seq_len: int, vocab_size: int) -> dict[str, Tensor]:
    """Sequences as transformers takes them: a 4-d additive mask that keeps documents apart."""
    rows = [random_sequence(index, seq_len=seq_len, vocab_size=vocab_size) for index in indices]
    documents = torch.stack(
        [torch.from_numpy(np.searchsorted(row["borders"], np.arange(seq_len), side="right")) for row in rows]
    )
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    seen = causal & (documents.unsqueeze(1) == documents.unsqueeze(2))
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).unsqueeze(1)
    join = {key: torch.stack([torch.from_numpy(row[key]) for row in rows]) for key in rows[0] if key != "borders"}
    return {**join, "attention_mask": mask}


def reference_training(config: Config, model: ModelConfig, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of plain training."""
    reference = reference_model(model, config.run.seed)
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    others = [p for p in reference.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    curve = []
    for step in range(steps):
        size = config.batch.global_batch_size
        data = dense_inputs(
            range(step * size, (step + 1) * size), seq_len=config.batch.seq_len, vocab_size=model.vocab_size
        )
        logits = reference(
            input_ids=data["tokens"], attention_mask=data["attention_mask"], position_ids=data["positions"]
        ).logits
        nll = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), reduction="none")
        loss = (nll * data["mask"].flatten()).sum() / data["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), config.optimizer.clip_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, config.train.steps, config.optimizer, config.schedule)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve
