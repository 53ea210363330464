"""transformers' DeepSeek-V3 as the independent truth: its settings, its fused weights, and the bias of its routers."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

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
    blocks = {f"blocks.{index}": f"model.layers.{index}" for index in range(model.num_layers)}
    blocks |= {f"mtp.{depth}.block": f"mtp.{depth}.mtp_block" for depth in range(model.num_predictions)}
    for ours, theirs in blocks.items():
        kv_a, k_rope, k_b, v_b = (weights[f"{ours}.attention.{part}.weight"] for part in PARTS)
        of_heads = [each.unflatten(0, (model.num_heads, -1)) for each in (k_b, v_b)]
        prefix = f"{theirs}.self_attn"
        found[f"{prefix}.kv_a_proj_with_mqa.weight"] = torch.cat((kv_a, k_rope))
        found[f"{prefix}.kv_b_proj.weight"] = torch.cat(of_heads, dim=1).flatten(0, 1)
    return found


def is_fused(name: str) -> bool:
    """Whether one of our weights is half of a tensor."""
    return any(f".attention.{part}." in name for part in PARTS)


OF_PREDICTIONS = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "post_norm"}


def prediction_layers(config: DeepseekV3Config, number: int) -> nn.ModuleList:
    """Its layers of multi-token prediction, which all have experts."""
    sparse = copy.deepcopy(config)
    sparse.first_k_dense_replace = 0
    return nn.ModuleList(MtpLayer(sparse, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, depth) for depth in range(number))


def losses_ahead(reference: nn.Module, stream: Tensor, data: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Of each layer the sum of its losses, as the paper has them, over tokens whose documents reach so far; and which
    these are."""
    rotation = reference.model.rotary_emb(stream, position_ids=data["positions"])
    found, shifted = [], {key: data[key] for key in ("tokens", "labels", "mask", "documents")}
    for layer in reference.mtp:
        shifted = {key: F.pad(each[:, 1:], (0, 1)) for key, each in shifted.items()}
        is_there = shifted["documents"] == data["documents"]
        is_there[:, -len(found) - 1 :] = False  # behind the row's end
        embedded = reference.model.embed_tokens(shifted["tokens"] * is_there)
        stream = layer(embedded, stream, rotation, data["attention_mask"], data["positions"], None)
        counts = shifted["mask"] * is_there  # of masks it is `and`
        nll = F.cross_entropy(reference.lm_head(stream).flatten(0, 1), shifted["labels"].flatten(), reduction="none")
        found.append(((nll * counts.flatten()).sum(), counts))
    return found


def gates_of(reference: nn.Module) -> list[nn.Module]:
    """The routers, those of predictions further ahead last."""
    blocks = [*reference.model.layers, *(layer.mtp_block for layer in getattr(reference, "mtp", ()))]
    found = (getattr(block.mlp, "gate", getattr(block.mlp, "router", None)) for block in blocks)  # gpt-oss' name
    return [gate for gate in found if gate is not None]


@torch.no_grad()
def move_biases(reference: torch.nn.Module, loads: list[Tensor], rate: float) -> None:
    """Balance without a loss: an expert that had more than its share is chosen less (Wang et al. 2024)."""
    for gate, load in zip(gates_of(reference), loads, strict=True):
        gate.e_score_correction_bias -= rate * torch.sign(load - load.mean())
