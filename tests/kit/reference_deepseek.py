"""transformers' DeepSeek-V3 as the independent truth: its settings, its fused weights, and the bias of its routers."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig

NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
PARTS = ("kv_a", "k_rope", "k_b", "v_b")
"""Of attention: two and two of them are one tensor there."""


def settings(model: ModelConfig) -> dict[str, object]:
    """What DeepseekV3Config is told besides what all are."""
    mla, moe = model.mla, model.moe
    found = {**mla.model_dump(), "head_dim": mla.qk_rope_head_dim, "rope_interleave": model.rope.interleaved}
    if moe is None:
        return {**found, "first_k_dense_replace": model.num_layers}
    return {
        **found,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": moe.first_dense,
    }


def fused(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Its tensors that are two of ours."""
    found = {}
    for index in range(model.num_layers):
        kv_a, k_rope, k_b, v_b = (weights[f"blocks.{index}.attention.{part}.weight"] for part in PARTS)
        of_heads = [each.unflatten(0, (model.num_heads, -1)) for each in (k_b, v_b)]
        prefix = f"model.layers.{index}.self_attn"
        found[f"{prefix}.kv_a_proj_with_mqa.weight"] = torch.cat((kv_a, k_rope))
        found[f"{prefix}.kv_b_proj.weight"] = torch.cat(of_heads, dim=1).flatten(0, 1)
    return found


def is_fused(name: str) -> bool:
    """Whether one of our weights is half of a tensor."""
    return any(f".attention.{part}." in name for part in PARTS)


@torch.no_grad()
def move_biases(reference: torch.nn.Module, loads: list[Tensor], rate: float) -> None:
    """Balance without a loss: an expert that had more than its share is chosen less (Wang et al. 2024)."""
    gates = [layer.mlp.gate for layer in reference.model.layers if hasattr(layer.mlp, "gate")]
    for gate, load in zip(gates, loads, strict=True):
        gate.e_score_correction_bias -= rate * torch.sign(load - load.mean())
